"""The CPU's matrix product in float32, in which a row's sums have one order whatever comes with it.

The weights lie in panels of 32 outputs [outputs / 32, inputs, 32], so that they are read from front
to back, once for up to 12 rows. Each output is summed up from the first input to the last in one
register.

With few rows a product takes as long as reading its weights from memory does. So weights that can
be told in fewer bits (`model.codes`) lie there as such, and a panel is written out part by part in
the core's cache before it is multiplied: with the same numbers, to the last bit.
"""

# ruff: noqa: ANN401, C901, PLR0915
# Numba's and LLVM's values have no types in Python, and a kernel is one function: loops in loops.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from tidegate_engine.model.codes import GROUP, Codes, find_codes
from tidegate_engine.model.openmp import Team
from tidegate_engine.model.simd import (
    LANES,
    Builder,
    Value,
    build_fma,
    build_load,
    build_prefetch,
    build_splat,
    build_store,
    fma,
    load,
    load_bytes,
    load_high_halves,
    load_low_halves,
    prefetch,
    store,
    take_ticket,
)

PANEL = 2 * LANES

# As many as registers hold sums for; and as many as stay in a core's cache while panels pass by: a
# panel is read from memory once for all of them.
_TILE_ROWS = 12
_MOST_TASK_ROWS = 264
# With fewer panels for each thread their rows are shared out, so that all threads end together.
_TASKS_PER_THREAD = 4
_PANEL_BYTES = 4 * PANEL
_HALF_BYTES = 4 * LANES
# How far ahead of their use weights are asked for. Memory answers within about that time; a byte of
# codes is worked on for longer.
_FLOATS_AHEAD_BYTES = 8192
_CODES_AHEAD_BYTES = 3072
_LINE_BYTES = 64

_FLOAT_BITS = 32
# How many inputs of a panel are written out before they are multiplied: those of 24 KiB stay in the
# core's nearest cache beside the rows.
_DESK_INPUTS = 192

_LONG, _FLOAT = ir.IntType(64), ir.FloatType()


class Panels:
    """A weight [outputs, inputs] as the kernel reads it; its outputs are a multiple of 32.

    Attributes:
        bits: Of each number, 32 in plain floats.
        memory: In floats [P, inputs, 32]; in codes for each group of 32 inputs the scales and
            the offsets of a panel's outputs, then the codes by input and output, of 4 bits those
            of two neighbouring inputs in a byte [P, inputs / 32, bytes].
    """

    def __init__(self, weight: Tensor) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        found = find_codes(weight)
        self.bits = _FLOAT_BITS if found is None else found.bits
        self.memory = _by_panel(weight).contiguous() if found is None else _pack(found)


def _by_panel(values: Tensor) -> Tensor:
    """[outputs, any] to [P, any, 32]."""
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2)


def _pack(found: Codes) -> Tensor:
    codes = _by_panel(found.codes)
    if found.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    num_panels, num_groups = len(codes), found.scales.shape[1]
    parts = [
        _by_panel(found.scales).contiguous().view(torch.uint8),
        _by_panel(found.offsets).contiguous().view(torch.uint8),
        codes.reshape(num_panels, num_groups, -1),
    ]
    return torch.cat(parts, dim=-1)


class Desks:
    """Memory in which each thread writes out a part of the panel that it works on."""

    def __init__(self) -> None:
        self._floats = np.zeros((0, _DESK_INPUTS, PANEL), np.float32)

    def reserve(self, num_threads: int) -> int:
        """Return where it begins, with a desk for each thread."""
        if num_threads > len(self._floats):
            self._floats = np.zeros((num_threads, _DESK_INPUTS, PANEL), np.float32)
        return int(self._floats.ctypes.data)


class PanelLinear:
    """A `Linear` on the CPU's own product; weights that it was made from aren't needed any more."""

    scales: Tensor | None = None

    def __init__(self, panels: Panels, function: int, team: Team, desks: Desks) -> None:
        """Prepare.

        Args:
            panels: The weight.
            function: Address of the kernel for so many inputs and bits.
            team: What it runs on.
            desks: Shared with what is computed before and after it.
        """
        self.num_outputs = panels.num_outputs
        self.tensors = (panels.memory,)
        self._num_panels = len(panels.memory)
        self._function = function
        self._team = team
        self._desks = desks
        self._arguments = np.zeros(10, np.int64)
        self._arguments[5] = self._num_panels
        self._arguments[7] = panels.memory.data_ptr()

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product."""
        out = rows.new_empty(len(rows), self.num_outputs)
        self.multiply_into(out, rows.contiguous())
        return out

    def multiply_into(self, out: Tensor, rows: Tensor) -> None:
        """Compute the product in `out`; both are contiguous."""
        num_rows, num_threads = len(rows), torch.get_num_threads()
        task_rows = rows_of_task(num_rows, self._num_panels, num_threads)
        num_tasks = self._num_panels * -(-num_rows // task_rows)
        self._arguments[:5] = (0, 0, num_tasks, num_rows, task_rows)
        self._arguments[6] = rows.data_ptr()
        self._arguments[8] = out.data_ptr()
        self._arguments[9] = self._desks.reserve(num_threads)
        self._team.run(self._function, self._arguments.ctypes.data, num_threads)


def rows_of_task(num_rows: int, num_panels: int, num_threads: int) -> int:
    """Return how many rows a thread multiplies with a panel at a time: whole tiles."""
    num_parts = -(-num_threads * _TASKS_PER_THREAD // num_panels)
    num_tiles = -(-num_rows // (num_parts * _TILE_ROWS))
    return min(max(num_tiles, 1) * _TILE_ROWS, _MOST_TASK_ROWS)


def product_kernel(size: int, bits: int) -> Callable[[Any], None]:
    """The product of rows with weights for so many inputs, each of so many bits.

    Arguments: 2 counters of tickets, number of tasks, of rows, of rows a task, of panels, then
    addresses of the rows [T, inputs], of the panels, of the output [T, outputs], and of memory for
    a part of a panel a thread.
    """
    has_floats, has_bytes = bits == _FLOAT_BITS, bits == 8
    code_bytes = PANEL * bits // 8
    group_bytes = 2 * _PANEL_BYTES + GROUP * code_bytes
    panel_bytes = size * _PANEL_BYTES if has_floats else size // GROUP * group_bytes
    # What lies behind a desk is another thread's: asking for it would take it from its cache.
    part_inputs, ahead = (size, _FLOATS_AHEAD_BYTES) if has_floats else (_DESK_INPUTS, 0)

    def product(arguments: Any) -> None:
        num_tasks, num_rows = arguments[2], arguments[3]
        task_rows, num_panels = arguments[4], arguments[5]
        rows, panels, output = arguments[6], arguments[7], arguments[8]
        desk = arguments[9] + take_ticket(arguments, 1) * (_DESK_INPUTS * _PANEL_BYTES)
        step = num_panels * _PANEL_BYTES
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            panel = task % num_panels
            first = task // num_panels * task_rows
            end = min(first + task_rows, num_rows)
            group = panels + panel * panel_bytes
            for start in range(0, size, part_inputs):
                count = min(part_inputs, size - start)
                weights = desk
                if has_floats:
                    weights = group + start * _PANEL_BYTES
                else:
                    place = desk
                    for _ in range(count // GROUP):
                        scale, more_scale = load(group), load(group + _HALF_BYTES)
                        offset = load(group + _PANEL_BYTES)
                        more_offset = load(group + _PANEL_BYTES + _HALF_BYTES)
                        codes = group + 2 * _PANEL_BYTES
                        for at in range(group, group + group_bytes, _LINE_BYTES):
                            prefetch(at + _CODES_AHEAD_BYTES)
                        group += group_bytes
                        for at in range(codes, group, PANEL):
                            if has_bytes:
                                left, right = load_bytes(at), load_bytes(at + LANES)
                                store(place, fma(scale, left, offset))
                                store(place + _HALF_BYTES, fma(more_scale, right, more_offset))
                            else:
                                left, right = load_low_halves(at), load_low_halves(at + LANES)
                                then, beside = load_high_halves(at), load_high_halves(at + LANES)
                                store(place, fma(scale, left, offset))
                                store(place + _HALF_BYTES, fma(more_scale, right, more_offset))
                                place += _PANEL_BYTES
                                store(place, fma(scale, then, offset))
                                store(place + _HALF_BYTES, fma(more_scale, beside, more_offset))
                            place += _PANEL_BYTES
                for row in range(first, end, _TILE_ROWS):
                    _multiply_tile(
                        min(_TILE_ROWS, end - row),
                        rows + row * (4 * size) + 4 * start,
                        weights,
                        output + row * step + panel * _PANEL_BYTES,
                        step,
                        start,
                        count,
                        size,
                        ahead,
                    )

    return product


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_tile(  # noqa: PLR0913, PLR0917 - an argument each is what Numba can compile
    _context: Any,
    count: Any,
    rows: Any,
    panel: Any,
    output: Any,
    step: Any,
    start: Any,
    inputs: Any,
    size: Any,
    ahead: Any,
) -> Any:
    """Multiply 1 to 12 rows with inputs of a panel; from the second part on add to the output.

    The weights so many bytes `ahead` are asked for; 0 = none are.
    """
    signature = types.void(count, rows, panel, output, step, start, inputs, size, ahead)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        num_rows, *values, _size, _ahead = arguments
        end = builder.append_basic_block("tile.end")
        choice = builder.switch(num_rows, end)
        for case in range(1, _TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows{case}")
            choice.add_case(ir.Constant(_LONG, case), block)
            builder.position_at_end(block)
            _build_tile(builder, values, case, size=size.literal_value, ahead=ahead.literal_value)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _build_tile(
    builder: Builder, values: list[Value], num_rows: int, *, size: int, ahead: int
) -> None:
    """Multiply so many rows; of the rows, the panel, the output, from its rows to the next, ..."""
    rows, panel, output, step, start, num_inputs = values
    zero = ir.Constant(ir.VectorType(_FLOAT, LANES), [0.0] * LANES)
    is_first = builder.icmp_signed("==", start, _number(0))
    places, started = [], []
    for _ in range(num_rows):
        places.append([builder.add(output, _number(4 * LANES * half)) for half in range(2)])
        started.append(
            [builder.select(is_first, zero, build_load(builder, place)) for place in places[-1]]
        )
        output = builder.add(output, step)
    entry = builder.block
    loop = builder.append_basic_block("inputs")
    end = builder.append_basic_block("inputs.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_LONG)
    before = [[builder.phi(zero.type) for _ in range(2)] for _ in range(num_rows)]
    following = builder.add(index, _number(1))
    index.add_incoming(_number(0), entry)
    index.add_incoming(following, loop)
    weights_at = builder.add(panel, builder.mul(index, _number(_PANEL_BYTES)))
    halves = [builder.add(weights_at, _number(4 * LANES * half)) for half in range(2)]
    weights = [build_load(builder, half) for half in halves]
    for half in halves if ahead else []:
        build_prefetch(builder, builder.add(half, _number(ahead)))
    column = builder.add(rows, builder.mul(index, _number(4)))
    after = []
    for row, sums in enumerate(before):
        # A number known now, so that it becomes part of the instruction, not one more register.
        at = builder.add(column, _number(4 * size * row))
        value = build_splat(builder, builder.load(builder.inttoptr(at, _FLOAT.as_pointer())))
        after.append(
            [
                build_fma(builder, value, weight, total)
                for weight, total in zip(weights, sums, strict=True)
            ]
        )
        for total, first, then in zip(sums, started[row], after[-1], strict=True):
            total.add_incoming(first, entry)
            total.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, num_inputs), loop, end)
    builder.position_at_end(end)
    for sums, own in zip(after, places, strict=True):
        for place, total in zip(own, sums, strict=True):
            build_store(builder, place, total)


def _number(value: int) -> Value:
    return ir.Constant(_LONG, value)
