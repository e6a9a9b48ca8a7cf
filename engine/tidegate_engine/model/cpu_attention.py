"""The CPU's attention kernels: they read keys and values where they lie, block by block.

A tile is up to `TILE_TOKENS` neighbouring tokens of a row. Its blocks are read once for all of them
and for all query heads, while they are in the core's nearest cache. Softmax is summed up block by
block, as in Online normalizer calculation for softmax (Milakov and Gimelshein, 2018), section 3.
What a token gets depends on its own query and on the positions before it alone: not on its tile,
nor on how a prompt was cut in chunks, down to the last bit.
"""

# ruff: noqa: ANN401, C901, PLR0912, PLR0915
# Numba's values have no types in Python, and a kernel is one function: loops within loops.

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic

from tidegate_engine.model.simd import (
    LANES,
    Builder,
    Value,
    add,
    build_exp,
    build_fma,
    build_keep,
    build_load,
    build_max,
    build_over_lanes,
    build_splat,
    build_store,
    divide,
    fma,
    load,
    load_float,
    load_ints,
    load_long,
    multiply,
    negative,
    prefetch,
    root,
    splat,
    store,
    store_float,
    sum_of,
    take_ticket,
)

TILE_TOKENS = 8
ROTATED_PER_TASK = 8
TILE_FIELDS = 4
"""64-bit integers that describe a tile: its first token in the step, the number of its tokens, the
first one's position in its sequence, the address of the row's block table."""

_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_LOWEST = -3.0e38


class AttentionShape(NamedTuple):
    """What the kernels are compiled for; block sizes and half head sizes are multiples of 16."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    num_layers: int
    block_size: int
    is_int8: bool
    has_bias: bool
    has_qk_norm: bool
    epsilon: float

    @property
    def scratch_floats(self) -> int:
        """Memory that one thread needs for `attend`."""
        shared = self.num_heads // self.num_kv_heads
        state = shared * (LANES + 1 + self.head_size)
        return TILE_TOKENS * (self.num_kv_heads * state + shared * LANES)


def _at(builder: Builder, base: Value, floats: int) -> Value:
    return builder.add(base, ir.Constant(_LONG, 4 * floats))


class _Block:
    """Builds the code that attends to 16 positions, for the query heads that share a KV head.

    State of a query: for each of its G heads 16 partial sums of weights, then for each the largest
    score so far, then for each the weighted sum of values [D].
    """

    def __init__(self, builder: Builder, head_size: Any, num_shared: Any, stride: Any) -> None:
        """Prepare; the sizes are Numba's types of literals."""
        self._builder = builder
        self._num_shared: int = num_shared.literal_value
        self._head_size: int = head_size.literal_value
        self._chunks = range(0, self._head_size, LANES)
        self._stride: int = stride.literal_value

    def score(self, query: Value, keys: Value, scores: Value) -> None:
        """Products of queries [G, D] with 16 keys, to `scores` [G, 16]."""
        queries = [
            [
                build_load(self._builder, _at(self._builder, query, g * self._head_size + chunk))
                for chunk in self._chunks
            ]
            for g in range(self._num_shared)
        ]
        for g, dots in enumerate(self._dots(queries, keys, 0, LANES)):
            build_store(self._builder, _at(self._builder, scores, g * LANES), dots)

    def weigh(self, scores: Value, state: Value, limit: Value) -> None:
        """Turn the first `limit` scores into weights, the others into 0, and rescale the state."""
        builder, num_shared = self._builder, self._num_shared
        zero = build_splat(builder, ir.Constant(_FLOAT, 0.0))
        lowest = build_splat(builder, ir.Constant(_FLOAT, _LOWEST))
        for g in range(num_shared):
            place, sums = _at(builder, scores, g * LANES), _at(builder, state, g * LANES)
            top_place = _at(builder, state, num_shared * LANES + g)
            seen = build_keep(builder, build_load(builder, place), limit, lowest)
            top_pointer = builder.inttoptr(top_place, _FLOAT.as_pointer())
            old = builder.load(top_pointer)
            top = build_max(builder, old, build_over_lanes(builder, seen, build_max))
            builder.store(top, top_pointer)
            weights = build_exp(builder, builder.fsub(seen, build_splat(builder, top)))
            weights = build_keep(builder, weights, limit, zero)
            build_store(builder, place, weights)
            # Mostly the largest score has been seen before, and what is summed up stays as it is.
            with builder.if_then(builder.fcmp_ordered(">", top, old), likely=False):
                self._fade(builder.fsub(old, top), [sums, *self._value_sums(state, g)])
            build_store(builder, sums, builder.fadd(build_load(builder, sums), weights))

    def _fade(self, change: Value, places: list[Value]) -> None:
        """Multiply what is summed up by the exponential of a change."""
        fade = build_exp(self._builder, build_splat(self._builder, change))
        for place in places:
            faded = self._builder.fmul(build_load(self._builder, place), fade)
            build_store(self._builder, place, faded)

    def add_values(self, weights: Value, values: Value, state: Value, limit: Value) -> None:
        """Add the first `limit` values, weighted; the sums stay in registers meanwhile."""
        builder = self._builder
        places = [self._value_sums(state, g) for g in range(self._num_shared)]
        before = [build_load(builder, place) for own in places for place in own]
        entry = builder.block
        loop = builder.append_basic_block("values")
        end = builder.append_basic_block("values.end")
        builder.branch(loop)
        builder.position_at_end(loop)
        index = builder.phi(_LONG)
        sums = [builder.phi(vector.type) for vector in before]
        row = builder.add(values, builder.mul(index, ir.Constant(_LONG, 4 * self._stride)))
        value = [build_load(builder, _at(builder, row, chunk)) for chunk in self._chunks]
        shift = builder.mul(index, ir.Constant(_LONG, 4))
        splats = []
        for g in range(self._num_shared):
            at = builder.add(_at(builder, weights, g * LANES), shift)
            weight = builder.load(builder.inttoptr(at, _FLOAT.as_pointer()))
            splats.append(build_splat(builder, weight))
        factors = [(weight, part) for weight in splats for part in value]
        after = [
            build_fma(builder, weight, part, total)
            for (weight, part), total in zip(factors, sums, strict=True)
        ]
        following = builder.add(index, ir.Constant(_LONG, 1))
        index.add_incoming(ir.Constant(_LONG, 0), entry)
        index.add_incoming(following, loop)
        for total, first, then in zip(sums, before, after, strict=True):
            total.add_incoming(first, entry)
            total.add_incoming(then, loop)
        builder.cbranch(builder.icmp_signed("<", following, limit), loop, end)
        builder.position_at_end(end)
        for place, total in zip([place for own in places for place in own], after, strict=True):
            build_store(builder, place, total)

    def _value_sums(self, state: Value, g: int) -> list[Value]:
        first = self._num_shared * (LANES + 1) + g * self._head_size
        return [_at(self._builder, state, first + chunk) for chunk in self._chunks]

    def _dots(self, queries: list[list[Value]], keys: Value, first: int, count: int) -> list[Value]:
        """One vector a query head: halves are summed up in pairs, until a lane is left of each."""
        builder = self._builder
        if count == 1:
            chunks = [
                build_load(builder, _at(builder, keys, first * self._stride + chunk))
                for chunk in self._chunks
            ]
            return [self._partial(query, chunks) for query in queries]
        left = self._dots(queries, keys, first, count // 2)
        right = self._dots(queries, keys, first + count // 2, count // 2)
        ints = ir.VectorType(ir.IntType(32), LANES)
        even = ir.Constant(ints, [*range(0, 2 * LANES, 2)])
        odd = ir.Constant(ints, [*range(1, 2 * LANES, 2)])
        return [
            builder.fadd(builder.shuffle_vector(a, b, even), builder.shuffle_vector(a, b, odd))
            for a, b in zip(left, right, strict=True)
        ]

    def _partial(self, query: list[Value], key: list[Value]) -> Value:
        total = self._builder.fmul(query[0], key[0])
        for left, right in zip(query[1:], key[1:], strict=True):
            total = build_fma(self._builder, left, right, total)
        return total


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _score(  # noqa: PLR0917 - an argument each is what Numba can compile
    _context: Any,
    query: Any,
    keys: Any,
    scores: Any,
    head_size: Any,
    num_shared: Any,
    stride: Any,
) -> Any:
    """Products of a query's heads with 16 keys."""
    signature = types.void(query, keys, scores, head_size, num_shared, stride)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        _Block(builder, head_size, num_shared, stride).score(*arguments[:3])
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _weigh(  # noqa: PLR0917 - an argument each is what Numba can compile
    _context: Any,
    scores: Any,
    state: Any,
    limit: Any,
    head_size: Any,
    num_shared: Any,
    stride: Any,
) -> Any:
    """Turn scores into weights, in place, and rescale the state of a query."""
    signature = types.void(scores, state, limit, head_size, num_shared, stride)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        _Block(builder, head_size, num_shared, stride).weigh(*arguments[:3])
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def _add_values(  # noqa: PLR0917 - an argument each is what Numba can compile
    _context: Any,
    weights: Any,
    values: Any,
    state: Any,
    limit: Any,
    head_size: Any,
    num_shared: Any,
    stride: Any,
) -> Any:
    """Add the first `limit` of 16 values, weighted, to the state of a query."""
    signature = types.void(weights, values, state, limit, head_size, num_shared, stride)

    def generate(context: Any, builder: Builder, _: Any, arguments: Any) -> Value:
        _Block(builder, head_size, num_shared, stride).add_values(*arguments[:4])
        return context.get_dummy_value()

    return signature, generate


def attend_kernel(shape: AttentionShape) -> Callable[[Any], None]:
    """Attention of all tiles.

    Arguments: 2 counters of tickets, number of tasks, KV heads a task, then addresses of the tiles,
    of the queries [T, H, D], scaled, of the output [T, H, D], of the pool at this layer, and of the
    scratch memory.
    """
    num_heads, num_kv_heads, size, num_layers, block_size = shape[:5]
    num_shared = num_heads // num_kv_heads
    stride = num_kv_heads * size
    query_bytes = 4 * num_shared * size
    block_bytes = 4 * block_size * stride
    table_step = 2 * num_layers * block_bytes
    sum_floats = LANES * num_shared
    state_floats = sum_floats + num_shared + query_bytes // 4
    state_bytes, scores_bytes = 4 * state_floats, 4 * sum_floats
    scratch_bytes = 4 * shape.scratch_floats
    scores_at = 4 * num_kv_heads * TILE_TOKENS * state_floats
    lowest, zero, one = float32(_LOWEST), float32(0.0), float32(1.0)

    def attend(arguments: Any) -> None:
        num_tasks, num_task_heads = arguments[2], arguments[3]
        tiles, queries, output, pool = arguments[4], arguments[5], arguments[6], arguments[7]
        states = arguments[8] + take_ticket(arguments, 1) * scratch_bytes
        scores = states + scores_at
        parts = num_kv_heads // num_task_heads
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            tile = tiles + (task // parts) * (8 * TILE_FIELDS)
            token, count = load_long(tile), load_long(tile + 8)
            position, table = load_long(tile + 16), load_long(tile + 24)
            first_head = (task % parts) * num_task_heads
            for i in range(num_task_heads * count):
                state = states + i * state_bytes
                for at in range(0, sum_floats, LANES):
                    store(state + 4 * at, splat(zero))
                for g in range(num_shared):
                    store_float(state + 4 * (sum_floats + g), lowest)
                for at in range(sum_floats + num_shared, state_floats, LANES):
                    store(state + 4 * at, splat(zero))
            following = pool + load_long(table) * table_step + first_head * (4 * size)
            for first in range(0, position + count, LANES):
                block, then = following, first + LANES
                if then < position + count:
                    following = pool + load_long(table + (then // block_size) * 8) * table_step
                    following += (then % block_size) * (4 * stride) + first_head * (4 * size)
                for head in range(num_task_heads):
                    # While this head's positions are computed, memory sends its next ones.
                    for key in range(0, LANES * 4 * stride, 4 * stride):
                        for at in range(head * (4 * size), (head + 1) * (4 * size), 4 * LANES):
                            prefetch(following + key + at)
                            prefetch(following + block_bytes + key + at)
                    # Stage by stage for all tokens: within one of them each stage waits for the
                    # one before, and the core would have nothing else to do meanwhile.
                    begin = max(0, first - position)
                    keys = block + head * (4 * size)
                    values = keys + block_bytes
                    state = states + head * count * state_bytes
                    row = token * num_kv_heads + first_head + head
                    for i in range(begin, count):
                        query = queries + (row + i * num_kv_heads) * query_bytes
                        _score(query, keys, scores + i * scores_bytes, size, num_shared, stride)
                    for i in range(begin, count):
                        limit = min(LANES, position + i + 1 - first)
                        own = scores + i * scores_bytes
                        _weigh(own, state + i * state_bytes, limit, size, num_shared, stride)
                    for i in range(begin, count):
                        limit = min(LANES, position + i + 1 - first)
                        own, sums = scores + i * scores_bytes, state + i * state_bytes
                        _add_values(own, values, sums, limit, size, num_shared, stride)
            for head in range(num_task_heads):
                for i in range(count):
                    state = states + (head * count + i) * state_bytes
                    sums = state + 4 * (sum_floats + num_shared)
                    row = (token + i) * num_kv_heads + first_head + head
                    for g in range(num_shared):
                        share = splat(one / sum_of(load(state + 4 * LANES * g)))
                        for at in range(g * size, (g + 1) * size, LANES):
                            result = multiply(load(sums + 4 * at), share)
                            store(output + row * query_bytes + 4 * at, result)

    return attend


def rotate_kernel(shape: AttentionShape) -> Callable[[Any], None]:
    """Turn queries and keys by their positions, and store keys and values in their blocks.

    Arguments: 2 counters of tickets, number of tasks, of tokens, then addresses of the projections
    [T, (H + 2K) * D], of their rows' and columns' scales, of the bias, of the norms' weights for
    query and key heads, of the tokens' positions [T], of the cosines and sines of all positions
    [any, 2, D / 2], of each token's place in the pool's layer 0 in floats [T], of the pool at this
    layer, and of the queries [T, H, D].
    """
    num_heads, num_kv_heads, size, _, block_size = shape[:5]
    is_int8, has_bias, has_qk_norm = shape.is_int8, shape.has_bias, shape.has_qk_norm
    half = size // 2
    num_turned = num_heads + num_kv_heads
    width = (num_heads + 2 * num_kv_heads) * size
    stride = num_kv_heads * size
    block_bytes = 4 * block_size * stride
    scale, epsilon, one = float32(size**-0.5), float32(shape.epsilon), float32(1.0)
    share = float32(1.0 / size)

    def rotate(arguments: Any) -> None:
        num_tasks, num_tokens, projected = arguments[2], arguments[3], arguments[4]
        row_scales, column_scales, bias = arguments[5], arguments[6], arguments[7]
        query_norm, key_norm, positions = arguments[8], arguments[9], arguments[10]
        turns, places = arguments[11], arguments[12]
        pool, queries = arguments[13], arguments[14]
        while True:
            task = take_ticket(arguments, 0)
            if task >= num_tasks:
                break
            first = task * ROTATED_PER_TASK
            for token in range(first, min(first + ROTATED_PER_TASK, num_tokens)):
                row = projected + token * (4 * width)
                if is_int8:
                    row_scale = splat(load_float(row_scales + 4 * token))
                    for at in range(0, 4 * width, 4 * LANES):
                        columns = multiply(load(column_scales + at), row_scale)
                        store(row + at, multiply(load_ints(row + at), columns))
                if has_bias:
                    for at in range(0, 4 * width, 4 * LANES):
                        store(row + at, add(load(row + at), load(bias + at)))
                cosines = turns + load_long(positions + 8 * token) * (4 * size)
                key = pool + 4 * load_long(places + 8 * token)
                for head in range(num_turned):
                    source = row + head * (4 * size)
                    is_query = head < num_heads
                    if has_qk_norm:
                        squares = splat(float32(0.0))
                        for at in range(0, 4 * size, 4 * LANES):
                            squares = fma(load(source + at), load(source + at), squares)
                        mean = fma(splat(sum_of(squares)), splat(share), splat(epsilon))
                        norm = divide(splat(one), root(mean))
                        weights = query_norm if is_query else key_norm
                        for at in range(0, 4 * size, 4 * LANES):
                            normed = multiply(load(source + at), norm)
                            store(source + at, multiply(normed, load(weights + at)))
                    target = key + (head - num_heads) * (4 * size)
                    factor = splat(one)
                    if is_query:
                        target = queries + (token * num_heads + head) * (4 * size)
                        factor = splat(scale)
                    for at in range(0, 4 * half, 4 * LANES):
                        x, y = load(source + at), load(source + at + 4 * half)
                        cosine = load(cosines + at)
                        sine = load(cosines + at + 4 * half)
                        turned_x = fma(x, cosine, negative(multiply(y, sine)))
                        turned_y = fma(y, cosine, multiply(x, sine))
                        store(target + at, multiply(turned_x, factor))
                        store(target + at + 4 * half, multiply(turned_y, factor))
                for at in range(0, 4 * stride, 4 * LANES):
                    store(key + block_bytes + at, load(row + num_turned * (4 * size) + at))

    return rotate
