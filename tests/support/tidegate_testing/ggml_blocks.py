"""GGML's quantised blocks, decoded one number at a time from the format's description.

Source: the structs and reference routines of ggml (ggml-common.h, ggml-quants.c), in words.
"""

import struct
from collections.abc import Callable

from gguf import GGMLQuantizationType as Kind


def _f16(block: bytes, start: int) -> float:
    return float(struct.unpack_from("<e", block, start)[0])


def _q8_0(block: bytes) -> list[float]:
    scale = _f16(block, 0)
    return [scale * value for value in struct.unpack_from("<32b", block, 2)]


def _nibbles(packed: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def _q4_0(block: bytes) -> list[float]:
    return [_f16(block, 0) * (value - 8) for value in _nibbles(block[2:])]


def _q4_1(block: bytes) -> list[float]:
    return [_f16(block, 0) * value + _f16(block, 2) for value in _nibbles(block[4:])]


def _q4_k(block: bytes) -> list[float]:
    """Eight runs of 32; scale and minimum of each in 6 bits."""
    scale, minimum, packed = _f16(block, 0), _f16(block, 2), block[4:16]
    values: list[float] = []
    for run in range(8):
        if run < 4:
            own_scale, own_minimum = packed[run] & 63, packed[run + 4] & 63
        else:
            own_scale = (packed[run + 4] & 15) | (packed[run - 4] >> 6) << 4
            own_minimum = (packed[run + 4] >> 4) | (packed[run] >> 6) << 4
        numbers = block[16 + run // 2 * 32 :][:32]
        for byte in numbers:
            value = byte >> 4 if run % 2 else byte & 15
            values.append(scale * own_scale * value - minimum * own_minimum)
    return values


def _q6_k(block: bytes) -> list[float]:
    """Sixteen runs of 16, each with a scale of 8 bits; 4 bits of a number lie apart from 2."""
    low, high, scales, scale = block[:128], block[128:192], block[192:208], _f16(block, 208)
    values: list[float] = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        byte = low[64 * half + 32 * (quarter % 2) + place]
        four = byte >> 4 if quarter >= 2 else byte & 15
        two = high[32 * half + place] >> (2 * quarter) & 3
        (own_scale,) = struct.unpack_from("<b", scales, i // 16)
        values.append(scale * own_scale * ((four | two << 4) - 32))
    return values


def _f32_block(block: bytes) -> list[float]:
    return [*struct.unpack("<f", block)]


def _bf16(block: bytes) -> list[float]:
    return [*struct.unpack("<f", b"\0\0" + block)]


# Bytes of a block, where its 16-bit scales lie, and how it is decoded.
BLOCKS: dict[Kind, tuple[int, tuple[int, ...], Callable[[bytes], list[float]]]] = {
    Kind.F32: (4, (), _f32_block),
    Kind.F16: (2, (), lambda block: [_f16(block, 0)]),
    Kind.BF16: (2, (), _bf16),
    Kind.Q8_0: (34, (0,), _q8_0),
    Kind.Q4_0: (18, (0,), _q4_0),
    Kind.Q4_1: (20, (0, 2), _q4_1),
    Kind.Q4_K: (144, (0, 2), _q4_k),
    Kind.Q6_K: (210, (208,), _q6_k),
}
