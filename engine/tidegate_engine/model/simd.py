"""Vectors of 16 floats in Numba: the words in which the CPU's kernels are written.

LLVM gives a vector what registers the machine has: one of AVX-512, two of AVX2, four of NEON. Loops
left to its own vectorisation would be slower, and their sums would be added in an order that
depends on the machine; here each has one order, the same for a row whatever its neighbours.

Addresses are integers. Nothing is checked: who writes a kernel answers for what it touches.
"""

# ruff: noqa: ANN401
# Numba's and LLVM's values have no types in Python.

from collections.abc import Callable
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

Builder: TypeAlias = Any
"""LLVM's, at the place where code is being written."""

Value: TypeAlias = Any
"""A value of the code being written."""

_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BYTES, _INTS = ir.VectorType(_BYTE, LANES), ir.VectorType(_INT, LANES)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_FLOAT_BYTES = 4

# exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2; the polynomial is that of Cephes' expf, good
# to 2 units in the last place. ln(2) is split so that n * its first part is exact.
_LEAST_EXPONENT, _MOST_EXPONENT = -87.0, 88.0
_LOG2_E = 1.4426950408889634
_LN2 = (0.693359375, -2.12194440e-4)
_EXP = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23


class _Vector(types.Type):  # type: ignore[misc]
    """Numba's name for 16 floats."""

    def __init__(self) -> None:
        super().__init__(name="vector")


class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    """How Numba holds them: as one value of LLVM's."""

    def __init__(self, manager: Any, numba_type: _Vector) -> None:
        super().__init__(manager, numba_type, _FLOATS)


register_model(_Vector)(_VectorModel)
_vector = _Vector()
_address, _count, _float = types.intp, types.intp, types.float32


def _define(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make what builds LLVM code a function that kernels can call."""
    signature = result(*arguments)

    def decorate(build: Callable[..., Value]) -> Any:
        def generate(context: Any, builder: Builder, _: Any, values: Any) -> Value:
            built = build(builder, *values)
            return context.get_dummy_value() if built is None else built

        # Numba wants to see as many parameters as there are arguments.
        typers: tuple[Callable[..., Any], ...] = (
            lambda _c: (signature, generate),
            lambda _c, _0: (signature, generate),
            lambda _c, _0, _1: (signature, generate),
            lambda _c, _0, _1, _2: (signature, generate),
        )
        return intrinsic(typers[len(arguments)])

    return decorate


def _pointer(builder: Builder, address: Value, kind: ir.Type) -> Value:
    return builder.inttoptr(address, kind.as_pointer())


def _constant(value: float) -> Value:
    return ir.Constant(_FLOATS, [value] * LANES)


def _lanes(*indices: int) -> Value:
    return ir.Constant(_INTS, indices)


def _call(builder: Builder, name: str, *arguments: Value) -> Value:
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_FLOATS, kinds), f"llvm.{name}.v{LANES}f32"
    )
    return builder.call(function, arguments)


def build_load(builder: Builder, address: Value) -> Value:
    """16 floats, from an address that needn't be aligned to more than one."""
    return builder.load(_pointer(builder, address, _FLOATS), align=_FLOAT_BYTES)


def build_store(builder: Builder, address: Value, vector: Value) -> None:
    """Write them."""
    builder.store(vector, _pointer(builder, address, _FLOATS), align=_FLOAT_BYTES)


def build_prefetch(builder: Builder, address: Value) -> None:
    """Ask for what lies there, which may be nothing."""
    kinds = [_BYTE.as_pointer(), _INT, _INT, _INT]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
    )
    read, nearest, is_data = _INT(0), _INT(3), _INT(1)
    builder.call(function, [_pointer(builder, address, _BYTE), read, nearest, is_data])


def build_splat(builder: Builder, number: Value) -> Value:
    """A vector of one number."""
    empty = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(empty, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, empty, _lanes(*[0] * LANES))


def build_fma(builder: Builder, left: Value, right: Value, added: Value) -> Value:
    """The sum of a product and a third vector, rounded once."""
    return _call(builder, "fma", left, right, added)


def build_max(builder: Builder, left: Value, right: Value) -> Value:
    """The larger, lane by lane."""
    return builder.select(builder.fcmp_ordered(">", left, right), left, right)


def build_exp(builder: Builder, vector: Value) -> Value:
    """The exponential function; it stays the same below -87 and above 88, where floats end."""
    x = build_max(builder, vector, _constant(_LEAST_EXPONENT))
    most = _constant(_MOST_EXPONENT)
    x = builder.select(builder.fcmp_ordered("<", x, most), x, most)
    n = _call(builder, "floor", build_fma(builder, x, _constant(_LOG2_E), _constant(0.5)))
    r = x
    for part in _LN2:
        r = build_fma(builder, n, _constant(-part), r)
    sum_ = _constant(_EXP[0])
    for coefficient in _EXP[1:]:
        sum_ = build_fma(builder, sum_, r, _constant(coefficient))
    one_and_r = builder.fadd(r, _constant(1.0))
    sum_ = build_fma(builder, sum_, builder.fmul(r, r), one_and_r)
    bits = builder.add(builder.fptosi(n, _INTS), _lanes(*[_EXPONENT_BIAS] * LANES))
    power = builder.bitcast(builder.shl(bits, _lanes(*[_MANTISSA_BITS] * LANES)), _FLOATS)
    return builder.fmul(sum_, power)


def build_keep(builder: Builder, vector: Value, count: Value, other: Value) -> Value:
    """The first `count` lanes of one vector, the rest of the other."""
    limit = build_splat(builder, builder.trunc(count, _INT))
    is_kept = builder.icmp_signed("<", _lanes(*range(LANES)), limit)
    return builder.select(is_kept, vector, other)


def build_over_lanes(
    builder: Builder, vector: Value, combine: Callable[[Builder, Value, Value], Value]
) -> Value:
    """One number of 16, halves with halves."""
    width = LANES
    while width > 1:
        width //= 2
        turned = _lanes(*((i + width) % LANES for i in range(LANES)))
        vector = combine(builder, vector, builder.shuffle_vector(vector, vector, turned))
    return builder.extract_element(vector, ir.Constant(_INT, 0))


def _build_add(builder: Builder, left: Value, right: Value) -> Value:
    return builder.fadd(left, right)


load = _define(_vector, _address)(build_load)
store = _define(types.void, _address, _vector)(build_store)
prefetch = _define(types.void, _address)(build_prefetch)
splat = _define(_vector, _float)(build_splat)
fma = _define(_vector, _vector, _vector, _vector)(build_fma)
add = _define(_vector, _vector, _vector)(_build_add)
larger = _define(_vector, _vector, _vector)(build_max)
exp = _define(_vector, _vector)(build_exp)


@_define(types.void, _address, _vector)
def stream(builder: Builder, address: Value, vector: Value) -> None:
    """Write them past the caches, to an address aligned to all 16.

    Others see them once `finish_streams` was called.
    """
    pointer = _pointer(builder, address, _FLOATS)
    written = builder.store(vector, pointer, align=LANES * _FLOAT_BYTES)
    written.set_metadata("nontemporal", builder.module.add_metadata([_INT(1)]))


@_define(types.void)
def finish_streams(builder: Builder) -> None:
    """Have all that this thread has streamed come before what it does next."""
    builder.fence("seq_cst")


@_define(_vector, _vector, _vector)
def multiply(builder: Builder, left: Value, right: Value) -> Value:
    """Lane by lane."""
    return builder.fmul(left, right)


@_define(_vector, _vector, _vector)
def divide(builder: Builder, left: Value, right: Value) -> Value:
    """Lane by lane."""
    return builder.fdiv(left, right)


@_define(_vector, _vector)
def negative(builder: Builder, vector: Value) -> Value:
    """Lane by lane."""
    return builder.fneg(vector)


@_define(_vector, _vector)
def root(builder: Builder, vector: Value) -> Value:
    """Square roots."""
    return _call(builder, "sqrt", vector)


@_define(_vector, _vector)
def magnitude(builder: Builder, vector: Value) -> Value:
    """Without signs."""
    return _call(builder, "fabs", vector)


@_define(_float, _vector)
def sum_of(builder: Builder, vector: Value) -> Value:
    """All lanes added."""
    return build_over_lanes(builder, vector, _build_add)


@_define(_float, _vector)
def largest_of(builder: Builder, vector: Value) -> Value:
    """The largest lane."""
    return build_over_lanes(builder, vector, build_max)


@_define(_float, _address)
def load_float(builder: Builder, address: Value) -> Value:
    """One float."""
    return builder.load(_pointer(builder, address, _FLOAT))


@_define(types.void, _address, _float)
def store_float(builder: Builder, address: Value, number: Value) -> None:
    """Write it."""
    builder.store(number, _pointer(builder, address, _FLOAT))


@_define(_count, _address)
def load_long(builder: Builder, address: Value) -> Value:
    """One 64-bit integer."""
    return builder.load(_pointer(builder, address, _LONG))


@_define(_vector, _address)
def load_ints(builder: Builder, address: Value) -> Value:
    """16 32-bit integers, as floats."""
    ints = builder.load(_pointer(builder, address, _INTS), align=_FLOAT_BYTES)
    return builder.sitofp(ints, _FLOATS)


def _build_load_bytes(builder: Builder, address: Value) -> Value:
    loaded = builder.load(_pointer(builder, address, _BYTES), align=1)
    return builder.zext(loaded, _INTS)


@_define(_vector, _address)
def load_bytes(builder: Builder, address: Value) -> Value:
    """16 bytes from 0 to 255, as floats."""
    return builder.sitofp(_build_load_bytes(builder, address), _FLOATS)


@_define(_vector, _address)
def load_low_halves(builder: Builder, address: Value) -> Value:
    """The lower 4 bits of 16 bytes, as floats."""
    low = builder.and_(_build_load_bytes(builder, address), _lanes(*[15] * LANES))
    return builder.sitofp(low, _FLOATS)


@_define(_vector, _address)
def load_high_halves(builder: Builder, address: Value) -> Value:
    """The upper 4 bits of 16 bytes, as floats."""
    high = builder.lshr(_build_load_bytes(builder, address), _lanes(*[4] * LANES))
    return builder.sitofp(high, _FLOATS)


@_define(types.void, _address, _vector)
def store_bytes(builder: Builder, address: Value, vector: Value) -> None:
    """Write floats in [-127, 127] as bytes, rounded to the nearest, halves to even."""
    ints = builder.fptosi(_call(builder, "nearbyint", vector), _INTS)
    builder.store(builder.trunc(ints, _BYTES), _pointer(builder, address, _BYTES), align=1)


@_define(_count, types.CPointer(types.int64), _count)
def take_ticket(builder: Builder, counters: Value, index: Value) -> Value:
    """A number that no other thread gets, in order from 0: threads share out work by these."""
    counter = builder.gep(counters, [index])
    return builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "monotonic")
