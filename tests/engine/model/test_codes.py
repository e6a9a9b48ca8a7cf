"""Codes against what GGUF files hold, and against numbers that were never made from codes."""

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tidegate_engine.model.codes import GROUP, Codes, find_codes
from tidegate_testing.model_files import quantised

BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}


def numbers(codes: Codes) -> Tensor:
    outputs, inputs = codes.codes.shape
    groups = codes.codes.view(outputs, -1, GROUP).double()
    scales, offsets = codes.scales.double()[..., None], codes.offsets.double()[..., None]
    return (scales * groups + offsets).float().view(outputs, inputs)


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_what_a_file_quantises_is_found_again_to_the_last_bit(kind: GGMLQuantizationType) -> None:
    plain = torch.randn(64, 96)
    plain[1, :GROUP] = 0.0  # has no scale
    weight = quantised(plain, kind)
    codes = find_codes(weight)
    assert codes is not None
    assert codes.bits == BITS[kind]
    assert torch.equal(numbers(codes), weight)


@pytest.mark.parametrize("kind", BITS, ids=lambda kind: kind.name)
def test_a_single_number_that_has_no_code_makes_the_whole_plain(
    kind: GGMLQuantizationType,
) -> None:
    weight = quantised(torch.randn(64, 96), kind)
    weight[40, 70] = torch.nextafter(weight[40, 70], torch.tensor(9.0))
    assert find_codes(weight) is None


def test_other_weights_have_none() -> None:
    torch.manual_seed(0)
    assert find_codes(torch.randn(64, 96)) is None
    assert find_codes(torch.zeros(64, 40)) is None
    assert find_codes(torch.full((64, 96), 1e30)) is None
