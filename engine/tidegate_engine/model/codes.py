"""Weights that were made from few bits, as those bits: the same numbers in less memory.

What a GGUF file quantises it stores as codes: 32 neighbouring inputs of an output share a scale and
an offset, and a weight is `scale * code + offset`, rounded once to float32. Scale and code are
found again in the numbers themselves, so that it doesn't matter where those came from; they count
only if every number comes out as it was, to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Neighbouring inputs that share a scale and an offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A weight [outputs, inputs] in G groups of inputs.

    Attributes:
        bits: Of a code, 4 or 8.
        codes: From 0 to 2^bits - 1 [outputs, inputs], uint8.
        scales: [outputs, G], float32.
        offsets: [outputs, G], float32.
    """

    bits: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor


def find_codes(weight: Tensor) -> Codes | None:
    """Return the fewest bits that give exactly this weight, in float32; None = there are none."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    groups = weight.view(outputs, -1, GROUP)
    return next((found for way in _WAYS if (found := _in_codes(groups, *way)) is not None), None)


def _between_extremes(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As Q4_1 does: 0 is the least number, 15 the largest."""
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    return _as_stored((most - least) / 15), _as_stored(least)


def _from_farthest(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As Q4_0 does: 0 is the number farthest from 0, whose code is 8."""
    farthest = groups.abs().argmax(-1, keepdim=True)
    scales = _as_stored(groups.gather(-1, farthest) / -8)
    return scales, -8 * scales


def _around_zero(groups: Tensor) -> tuple[Tensor, Tensor]:
    """As Q8_0 does, whose codes go from -127 to 127; here 128 stands for 0."""
    scales = _as_stored(groups.abs().amax(-1, keepdim=True) / 127)
    return scales, -128 * scales


_Way = Callable[[Tensor], tuple[Tensor, Tensor]]
_WAYS: tuple[tuple[int, _Way], ...] = (
    (4, _between_extremes),
    (4, _from_farthest),
    (8, _around_zero),
)


def _as_stored(numbers: Tensor) -> Tensor:
    """Round to the 16 bits that files have for a scale or an offset."""
    return numbers.half().float()


def _in_codes(groups: Tensor, bits: int, way: _Way) -> Codes | None:
    """Try one way on all groups [outputs, G, 32]."""
    # One output tells of nearly all weights that they were made otherwise.
    if len(groups) > 1 and _in_codes(groups[:1], bits, way) is None:
        return None
    scales, offsets = way(groups)
    codes = ((groups - offsets) / torch.where(scales == 0, 1.0, scales)).round_()
    # A product of 16-bit scales and codes is exact, so that this rounds once: as a fused operation.
    numbers = scales * codes + offsets
    if not torch.equal(numbers, groups) or codes.min() < 0 or codes.max() >= 1 << bits:
        return None
    return Codes(
        bits=bits,
        codes=codes.to(torch.uint8).flatten(1),
        scales=scales.squeeze(-1),
        offsets=offsets.squeeze(-1),
    )
