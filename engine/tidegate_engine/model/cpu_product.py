"""The CPU's matrix product in float32, in which a row's sums have one order whatever comes with it.

The weights lie in panels of 32 outputs [outputs / 32, inputs, 32], so that they are read from front
to back, once for up to 12 rows: with few rows a product takes as long as reading the weights does.
Each output is summed up from the first input to the last in one register.
"""

# ruff: noqa: ANN401
# Numba's and LLVM's values have no types in Python.

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

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
# How far ahead of their use weights are asked for. Memory answers within about that time.
_PREFETCH_BYTES = 8192

_LONG, _FLOAT = ir.IntType(64), ir.FloatType()


class PanelLinear:
    """A `Linear` on the CPU's own product; weights that it was made from aren't needed any more."""

    scales: Tensor | None = None

    def __init__(self, weight: Tensor, function: int, team: Team) -> None:
        """Lay out a weight [outputs, inputs].

        Args:
            weight: Its outputs are a multiple of 32.
            function: Address of the kernel for so many inputs.
            team: What it runs on.
        """
        self.num_outputs, num_inputs = weight.shape
        self._panels = weight.view(-1, PANEL, num_inputs).transpose(1, 2).contiguous()
        self.tensors = (self._panels,)
        self._function = function
        self._team = team
        self._arguments = np.zeros(9, np.int64)
        self._arguments[5] = len(self._panels)
        self._arguments[7] = self._panels.data_ptr()

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product."""
        out = rows.new_empty(len(rows), self.num_outputs)
        self.multiply_into(out, rows.contiguous())
        return out

    def multiply_into(self, out: Tensor, rows: Tensor) -> None:
        """Compute the product in `out`; both are contiguous."""
        num_rows, num_threads = len(rows), torch.get_num_threads()
        task_rows = rows_of_task(num_rows, len(self._panels), num_threads)
        num_tasks = len(self._panels) * -(-num_rows // task_rows)
        self._arguments[:5] = (0, 0, num_tasks, num_rows, task_rows)
        self._arguments[6] = rows.data_ptr()
        self._arguments[8] = out.data_ptr()
        self._team.run(self._function, self._arguments.ctypes.data, num_threads)


def rows_of_task(num_rows: int, num_panels: int, num_threads: int) -> int:
    """Return how many rows a thread multiplies with a panel at a time: whole tiles."""
    num_parts = -(-num_threads * _TASKS_PER_THREAD // num_panels)
    num_tiles = -(-num_rows // (num_parts * _TILE_ROWS))
    return min(max(num_tiles, 1) * _TILE_ROWS, _MOST_TASK_ROWS)


def product_kernel(size: int) -> Callable[[Any], None]:
    """The product of rows with weights for so many inputs.

    Arguments: 2 counters of tickets, number of tasks, of rows, of rows a task, of panels, then
    addresses of the rows [T, inputs], of the panels, and of the output [T, outputs].
    """

    def product(arguments: Any) -> None:
        num_tasks, num_rows = arguments[2], arguments[3]
        task_rows, num_panels = arguments[4], arguments[5]
        rows, panels, output = arguments[6], arguments[7], arguments[8]
        step = num_panels * _PANEL_BYTES
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            panel = task % num_panels
            first = task // num_panels * task_rows
            end = min(first + task_rows, num_rows)
            for row in range(first, end, _TILE_ROWS):
                _multiply_tile(
                    rows + row * (4 * size),
                    panels + panel * (_PANEL_BYTES * size),
                    output + row * step + panel * _PANEL_BYTES,
                    step,
                    min(_TILE_ROWS, end - row),
                    size,
                )

    return product


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _multiply_tile(  # noqa: PLR0917 - an argument each is what Numba can compile
    _context: Any, rows: Any, panel: Any, output: Any, step: Any, count: Any, size: Any
) -> Any:
    """Multiply 1 to 12 rows with one panel."""
    signature = types.void(rows, panel, output, step, count, size)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        *addresses, num_rows, _size = arguments
        end = builder.append_basic_block("tile.end")
        choice = builder.switch(num_rows, end)
        for case in range(1, _TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows{case}")
            choice.add_case(ir.Constant(_LONG, case), block)
            builder.position_at_end(block)
            _build_tile(builder, addresses, case, size.literal_value)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return signature, generate


def _build_tile(builder: Builder, addresses: list[Value], num_rows: int, size: int) -> None:
    """Multiply so many rows; of the rows, the panel, the output, and from its rows to the next."""
    rows, panel, output, step = addresses
    entry = builder.block
    loop = builder.append_basic_block("inputs")
    end = builder.append_basic_block("inputs.end")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_LONG)
    zero = ir.Constant(ir.VectorType(_FLOAT, LANES), [0.0] * LANES)
    before = [[builder.phi(zero.type) for _ in range(2)] for _ in range(num_rows)]
    following = builder.add(index, _number(1))
    index.add_incoming(_number(0), entry)
    index.add_incoming(following, loop)
    weights_at = builder.add(panel, builder.mul(index, _number(_PANEL_BYTES)))
    halves = [builder.add(weights_at, _number(4 * LANES * half)) for half in range(2)]
    weights = [build_load(builder, half) for half in halves]
    for half in halves:
        build_prefetch(builder, builder.add(half, _number(_PREFETCH_BYTES)))
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
        for total, then in zip(sums, after[-1], strict=True):
            total.add_incoming(zero, entry)
            total.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, _number(size)), loop, end)
    builder.position_at_end(end)
    for sums in after:
        for half, total in enumerate(sums):
            build_store(builder, builder.add(output, _number(4 * LANES * half)), total)
        output = builder.add(output, step)


def _number(value: int) -> Value:
    return ir.Constant(_LONG, value)
