"""What the CPU's kernels work on: memory that is used step after step, and where it lies.

Kernels take their arguments from tables, a row for each of a step's calls. Nearly all of them are
addresses that hold as long as the memory does, so that a step changes a few columns only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate_engine.model.batch import Batch, RowTable
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cpu_attention import ROTATED_PER_TASK, TILE_TOKENS, AttentionShape
from tidegate_engine.model.cpu_kernels import CpuKernels
from tidegate_engine.model.cpu_rows import GATED_PER_TASK, NORMED_PER_TASK
from tidegate_engine.model.layers import Layer, Layers
from tidegate_engine.model.linear import BareLinear
from tidegate_engine.model.openmp import Team

Ints = npt.NDArray[np.int64]
Column = int | Ints
"""A value for all calls of a table, or one a call."""

_NUM_COUNTERS = 2
_NUM_ARGUMENTS = 16
_LONG_BYTES = 8
# With fewer tiles for each thread, their KV heads are shared out one by one.
_TILES_PER_THREAD = 4


class CallTable:
    """The arguments of one kernel; a row is good for one call a step."""

    def __init__(self, team: Team, function: int, num_calls: int, *columns: Column) -> None:
        """Fill the columns behind the counters of a kernel's address."""
        self._team = team
        self._function = function
        self._rows: Ints = np.zeros((num_calls, _NUM_ARGUMENTS), np.int64)
        self._num_threads = 1
        for i, column in enumerate(columns):
            self.put(i, column)
        self._address = address_of(self._rows)

    def put(self, index: int, column: Column) -> None:
        """Set a column, counted from the one behind the counters."""
        self._rows[:, _NUM_COUNTERS + index] = column

    def begin(self, num_threads: int, num_tasks: int, *columns: Column) -> None:
        """Begin a step: set the first columns, and let the counters begin at 0."""
        self._rows[:, :_NUM_COUNTERS] = 0
        for i, column in enumerate((num_tasks, *columns)):
            self.put(i, column)
        # A task alone isn't worth waking anybody for.
        self._num_threads = min(num_threads, num_tasks)

    def call(self, row: int) -> None:
        """Run the kernel on one row's arguments."""
        arguments = self._address + row * (_LONG_BYTES * _NUM_ARGUMENTS)
        self._team.run(self._function, arguments, self._num_threads)


@dataclass(frozen=True, slots=True)
class Product:
    """Where the input and the output of a product with weights lie, each [capacity, any].

    Attributes:
        scales: Of the input's rows [capacity], where that is in 8 bits.
    """

    rows: Tensor
    scales: Tensor
    out: Tensor

    @classmethod
    def allocate(cls, linear: BareLinear, num_inputs: int, capacity: int) -> "Product":
        """Reserve memory; the system hands out its pages as they are first used."""
        is_int8 = linear.scales is not None
        return cls(
            rows=_zeros((capacity, num_inputs), np.int8 if is_int8 else np.float32),
            scales=_zeros((capacity,), np.float32),
            out=_zeros((capacity, linear.num_outputs), np.int32 if is_int8 else np.float32),
        )

    def compute(self, linear: BareLinear, num_rows: int) -> None:
        """Multiply the first rows."""
        linear.multiply_into(self.out[:num_rows], self.rows[:num_rows])


class Workspace:
    """Memory for steps of up to `capacity` tokens, and the tables of all kernels.

    Attributes:
        quantisations: None unless products are in 8 bits; `dequantisation` too.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layers: Layers[BareLinear],
        turns: Tensor,
        *,
        kernels: CpuKernels,
        team: Team,
        capacity: int,
        num_threads: int,
    ) -> None:
        """Reserve it; `turns` [positions, D] are cosines and sines."""
        first = layers.layers[0]
        self.capacity = capacity
        self._tensors = (turns,)
        self._shape = kernels.shape
        floats = (capacity, config.hidden_size)
        self.hidden, self.last_hidden = _zeros(floats, np.float32), _zeros(floats, np.float32)
        self.queries = _zeros((capacity, config.query_size), np.float32)
        self.attended = _zeros((capacity, config.query_size), np.float32)
        self.qkv = Product.allocate(first.qkv, config.hidden_size, capacity)
        self.attention_output = Product.allocate(
            first.attention_output, config.query_size, capacity
        )
        self.gate_up = Product.allocate(first.gate_up, config.hidden_size, capacity)
        self.down = Product.allocate(first.down, config.intermediate_size, capacity)
        self.last_down = Product.allocate(first.down, 1, capacity)
        self.last_rows = torch.zeros_like(self.qkv.rows)
        self._last_scales = torch.zeros_like(self.qkv.scales)
        widest = max(config.hidden_size, config.intermediate_size)
        self._scratch = _zeros((num_threads, widest), np.float32)
        self._states = _zeros((num_threads, kernels.shape.scratch_floats), np.float32)
        self.num_threads = num_threads
        self._step: tuple[object, ...] = ()
        self.quantisations: CallTable | None = None
        self.dequantisation: CallTable | None = None
        self._fill(layers, turns, kernels, team)

    def begin(self, batch: Batch, pool: Tensor) -> None:
        """Set what a step changes."""
        shape = self._shape
        num_tokens = len(batch.positions)
        num_threads = min(torch.get_num_threads(), self.num_threads)
        tiles = tiles_of(batch.rows)
        token_floats = shape.num_kv_heads * shape.head_size
        places = batch.blocks * pool.stride(0) + batch.offsets * token_floats
        # Whose addresses the tables hold has to stay until the step has ended.
        self._step = (batch, pool, tiles, places)
        layers = layer_addresses(pool, shape)
        row_tasks = -(-num_tokens // NORMED_PER_TASK)
        self.norms.begin(num_threads, row_tasks, num_tokens)
        self.rotations.begin(num_threads, -(-num_tokens // ROTATED_PER_TASK), num_tokens)
        self.rotations.put(8, address_of(batch.positions))
        self.rotations.put(10, address_of(places))
        self.rotations.put(11, layers)
        shared_out = len(tiles) < _TILES_PER_THREAD * num_threads
        num_task_heads = 1 if shared_out else shape.num_kv_heads
        num_tasks = len(tiles) * (shape.num_kv_heads // num_task_heads)
        self.attentions.begin(num_threads, num_tasks, num_task_heads, address_of(tiles))
        self.attentions.put(5, layers)
        if self.quantisations is not None:
            self.quantisations.begin(num_threads, row_tasks, num_tokens)
        self.gates.begin(num_threads, -(-num_tokens // GATED_PER_TASK), num_tokens)

    def begin_logits(self, sampled: Tensor, logits: Tensor) -> None:
        """Gather the rows that sample, and set what these change."""
        count = len(sampled)
        num_threads = min(torch.get_num_threads(), self.num_threads)
        for source, target in (
            (self.hidden, self.last_hidden),
            (self.down.out, self.last_down.out),
            (self.down.scales, self.last_down.scales),
        ):
            torch.index_select(source, 0, sampled, out=target[:count])
        self.final_norm.begin(num_threads, -(-count // NORMED_PER_TASK), count)
        if self.dequantisation is not None:
            self.dequantisation.begin(num_threads, count, count, address_of(logits))

    def _fill(
        self, layers: Layers[BareLinear], turns: Tensor, kernels: CpuKernels, team: Team
    ) -> None:
        each = layers.layers
        count = len(each)
        scratch = address_of(self._scratch)
        attended = self.attended if kernels.quantise else self.attention_output.rows
        self.norms = CallTable(team, kernels.add_and_norm, 2 * count, *self._norm_columns(each))
        self.final_norm = CallTable(
            team,
            kernels.add_and_norm,
            1,
            *(0, 0, address_of(self.last_hidden), address_of(self.last_down.out)),
            *(address_of(self.last_down.scales), address_of(each[-1].down.scales)),
            *(address_of(layers.final_norm), address_of(self.last_rows)),
            *(address_of(self._last_scales), scratch),
        )
        self.rotations = CallTable(
            team,
            kernels.rotate,
            count,
            *(0, 0, address_of(self.qkv.out), address_of(self.qkv.scales)),
            _addresses(each, lambda layer: layer.qkv.scales),
            _addresses(each, lambda layer: layer.qkv_bias),
            _addresses(each, lambda layer: layer.query_norm),
            _addresses(each, lambda layer: layer.key_norm),
            *(0, address_of(turns), 0, 0, address_of(self.queries)),
        )
        self.attentions = CallTable(
            team,
            kernels.attend,
            count,
            *(0, 0, 0, address_of(self.queries), address_of(attended), 0, address_of(self._states)),
        )
        self.gates = CallTable(
            team,
            kernels.gate,
            count,
            *(0, 0, address_of(self.gate_up.out), address_of(self.gate_up.scales)),
            _addresses(each, lambda layer: layer.gate_up.scales),
            *(address_of(self.down.rows), address_of(self.down.scales), scratch),
        )
        if kernels.quantise:
            rows, scales = self.attention_output.rows, self.attention_output.scales
            places = (address_of(attended), address_of(rows), address_of(scales))
            self.quantisations = CallTable(team, kernels.quantise, count, 0, 0, *places)
            self.dequantisation = CallTable(
                team,
                kernels.dequantise,
                1,
                *(0, 0, 0, address_of(self._last_scales), address_of(layers.output.scales)),
            )

    def _norm_columns(self, layers: Sequence[Layer[BareLinear]]) -> tuple[Column, ...]:
        """Two calls a layer: before attention, with the last layer's output, and before the MLP."""
        attention_output, down, count = self.attention_output, self.down, len(layers)
        weights = _pairs(
            _addresses(layers, lambda layer: layer.attention_norm),
            _addresses(layers, lambda layer: layer.mlp_norm),
            count,
        )
        down_scales = _addresses(layers, lambda layer: layer.down.scales)
        product = _pairs(address_of(down.out), address_of(attention_output.out), count)
        product[0] = 0
        return (
            *(0, 0, address_of(self.hidden), product),
            _pairs(address_of(down.scales), address_of(attention_output.scales), count),
            _pairs(
                np.roll(down_scales, 1),
                _addresses(layers, lambda layer: layer.attention_output.scales),
                count,
            ),
            weights,
            _pairs(address_of(self.qkv.rows), address_of(self.gate_up.rows), count),
            _pairs(address_of(self.qkv.scales), address_of(self.gate_up.scales), count),
            address_of(self._scratch),
        )


def tiles_of(rows: RowTable) -> Ints:
    """Cut all rows into tiles [tiles, 4], those with the most work first.

    Whoever of the threads is free takes the next one, so that at the end they wait for a small one.
    """
    counts = -(-rows.lengths // TILE_TOKENS)
    row = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    offset = (np.arange(len(row)) - before[row]) * TILE_TOKENS
    num_tokens = np.minimum(TILE_TOKENS, rows.lengths[row] - offset)
    position = rows.starts[row] + offset
    tables = address_of(rows.block_tables) + row * rows.block_tables.strides[0]
    tiles = np.stack((rows.firsts[row] + offset, num_tokens, position, tables), axis=1)
    order = np.argsort(-num_tokens * (position + num_tokens), kind="stable")
    return np.ascontiguousarray(tiles[order])


def layer_addresses(pool: Tensor, shape: AttentionShape) -> Ints:
    """Where each layer begins in the pool's first block."""
    layer_bytes = pool.stride(1) * pool.element_size()
    addresses: Ints = pool.data_ptr() + np.arange(shape.num_layers, dtype=np.int64) * layer_bytes
    return addresses


def address_of(array: Tensor | npt.NDArray[Any] | None) -> int:
    """Return where it lies; 0 for None. Whoever keeps the number keeps the array, too."""
    if array is None:
        return 0
    return array.data_ptr() if isinstance(array, Tensor) else int(array.ctypes.data)


def _addresses(
    layers: Sequence[Layer[BareLinear]], choose: Callable[[Layer[BareLinear]], Tensor | None]
) -> Ints:
    return np.array([address_of(choose(layer)) for layer in layers], np.int64)


def _pairs(first: Column, second: Column, count: int) -> Ints:
    """Take turns between two columns."""
    pairs = np.empty((count, 2), np.int64)
    pairs[:, 0], pairs[:, 1] = first, second
    return pairs.reshape(-1)


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.zeros(shape, dtype))
