"""The CPU's kernels that work row by row: norms, gates, and what surrounds 8-bit products.

In 8 bits a row of a matrix product's input is its values in [-127, 127] and one scale; the output
is 32-bit sums, whose scale is that of the row times that of the weight's row.
"""

# ruff: noqa: ANN401, C901, PLR0912, PLR0915
# Numba's values have no types in Python, and a kernel is one function: loops within loops.

from collections.abc import Callable
from typing import Any

from numba import float32

from tidegate_engine.model.simd import (
    LANES,
    add,
    divide,
    exp,
    fma,
    larger,
    largest_of,
    load,
    load_float,
    load_ints,
    magnitude,
    multiply,
    negative,
    root,
    splat,
    store,
    store_bytes,
    store_float,
    sum_of,
    take_ticket,
)

NORMED_PER_TASK = 16
GATED_PER_TASK = 4

_VECTOR_BYTES = 4 * LANES
_MAX_BYTE = 127.0


def add_and_norm_kernel(size: int, epsilon: float, *, is_int8: bool) -> Callable[[Any], None]:
    """Add a product to the hidden state, then give its norm (RMSNorm, Zhang and Sennrich, 2019).

    Arguments: 2 counters of tickets, number of tasks, of rows, then addresses of the hidden state
    [T, hidden], of the product (0 = add nothing), of its rows' and columns' scales, of the norm's
    weights, of the output, of its rows' scales, and of scratch memory of a row a thread.
    """
    row_bytes = 4 * size
    output_bytes = size if is_int8 else row_bytes
    share, small, one = float32(1.0 / size), float32(epsilon), float32(1.0)
    zero, most = float32(0.0), float32(_MAX_BYTE)

    def add_and_norm(arguments: Any) -> None:
        num_tasks, num_rows, hidden = arguments[2], arguments[3], arguments[4]
        product = arguments[5]
        row_scales, column_scales, weights = arguments[6], arguments[7], arguments[8]
        output, output_scales, scratch = arguments[9], arguments[10], arguments[11]
        normed = scratch + take_ticket(arguments, 1) * row_bytes
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            first = task * NORMED_PER_TASK
            for row in range(first, min(first + NORMED_PER_TASK, num_rows)):
                state, added = hidden + row * row_bytes, product + row * row_bytes
                result = output + row * output_bytes
                squares = splat(zero)
                if product != 0 and is_int8:
                    row_scale = splat(load_float(row_scales + 4 * row))
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        scale = multiply(load(column_scales + at), row_scale)
                        total = fma(load_ints(added + at), scale, load(state + at))
                        store(state + at, total)
                        squares = fma(total, total, squares)
                elif product != 0:
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        total = add(load(added + at), load(state + at))
                        store(state + at, total)
                        squares = fma(total, total, squares)
                else:
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        squares = fma(load(state + at), load(state + at), squares)
                mean = fma(splat(sum_of(squares)), splat(share), splat(small))
                norm = divide(splat(one), root(mean))
                if is_int8:
                    top = splat(zero)
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        value = multiply(multiply(load(state + at), norm), load(weights + at))
                        store(normed + at, value)
                        top = larger(top, magnitude(value))
                    largest = largest_of(top)
                    store_float(output_scales + 4 * row, largest / most)
                    factor = splat(most / largest if largest > zero else zero)
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        store_bytes(result + at // 4, multiply(load(normed + at), factor))
                else:
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        value = multiply(multiply(load(state + at), norm), load(weights + at))
                        store(result + at, value)

    return add_and_norm


def gate_kernel(size: int, *, is_int8: bool) -> Callable[[Any], None]:
    """The gated unit between the feed-forward products, SwiGLU (Shazeer, 2020): silu(gate) * up.

    Arguments: 2 counters of tickets, number of tasks, of rows, then addresses of the product
    [T, 2 * intermediate], of its rows' and columns' scales, of the output [T, intermediate], of its
    rows' scales, and of scratch memory of a row of the output a thread.
    """
    row_bytes = 4 * size
    zero, one, most = float32(0.0), float32(1.0), float32(_MAX_BYTE)

    def gate(arguments: Any) -> None:
        num_tasks, num_rows, product = arguments[2], arguments[3], arguments[4]
        row_scales, column_scales = arguments[5], arguments[6]
        output, output_scales, scratch = arguments[7], arguments[8], arguments[9]
        gated = scratch + take_ticket(arguments, 1) * row_bytes
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            first = task * GATED_PER_TASK
            for row in range(first, min(first + GATED_PER_TASK, num_rows)):
                gates = product + row * (2 * row_bytes)
                target = gated if is_int8 else output + row * row_bytes
                row_scale = splat(one)
                if is_int8:
                    row_scale = splat(load_float(row_scales + 4 * row))
                top = splat(zero)
                for at in range(0, row_bytes, _VECTOR_BYTES):
                    if is_int8:
                        scale = multiply(load(column_scales + at), row_scale)
                        x = multiply(load_ints(gates + at), scale)
                        scale = multiply(load(column_scales + row_bytes + at), row_scale)
                        y = multiply(load_ints(gates + row_bytes + at), scale)
                    else:
                        x, y = load(gates + at), load(gates + row_bytes + at)
                    silu = divide(x, add(splat(one), exp(negative(x))))
                    value = multiply(silu, y)
                    store(target + at, value)
                    top = larger(top, magnitude(value))
                if is_int8:
                    largest = largest_of(top)
                    store_float(output_scales + 4 * row, largest / most)
                    factor = splat(most / largest if largest > zero else zero)
                    result = output + row * size
                    for at in range(0, row_bytes, _VECTOR_BYTES):
                        store_bytes(result + at // 4, multiply(load(gated + at), factor))

    return gate


def quantise_kernel(size: int) -> Callable[[Any], None]:
    """Rows of floats to 8 bits.

    Arguments: 2 counters of tickets, number of tasks, of rows, then addresses of the rows
    [T, size], of the output [T, size], and of its rows' scales.
    """
    row_bytes = 4 * size
    zero, most = float32(0.0), float32(_MAX_BYTE)

    def quantise(arguments: Any) -> None:
        num_tasks, num_rows, rows = arguments[2], arguments[3], arguments[4]
        output, output_scales = arguments[5], arguments[6]
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            first = task * NORMED_PER_TASK
            for row in range(first, min(first + NORMED_PER_TASK, num_rows)):
                source, result = rows + row * row_bytes, output + row * size
                top = splat(zero)
                for at in range(0, row_bytes, _VECTOR_BYTES):
                    top = larger(top, magnitude(load(source + at)))
                largest = largest_of(top)
                store_float(output_scales + 4 * row, largest / most)
                factor = splat(most / largest if largest > zero else zero)
                for at in range(0, row_bytes, _VECTOR_BYTES):
                    store_bytes(result + at // 4, multiply(load(source + at), factor))

    return quantise


def dequantise_kernel(size: int) -> Callable[[Any], None]:
    """Products in 8 bits to floats, in place.

    Arguments: 2 counters of tickets, number of tasks, of rows, then addresses of the product
    [T, size] and of its rows' and columns' scales.
    """
    row_bytes = 4 * size

    def dequantise(arguments: Any) -> None:
        num_tasks, num_rows, product = arguments[2], arguments[3], arguments[4]
        row_scales, column_scales = arguments[5], arguments[6]
        while True:
            row = take_ticket(arguments, 0)
            if row >= min(num_tasks, num_rows):
                break
            values = product + row * row_bytes
            row_scale = splat(load_float(row_scales + 4 * row))
            for at in range(0, row_bytes, _VECTOR_BYTES):
                scale = multiply(load(column_scales + at), row_scale)
                store(values + at, multiply(load_ints(values + at), scale))

    return dequantise
