import dataclasses
import math

import pytest
import torch

from tidegate_engine.model.config import ModelConfigError
from tidegate_engine.model.rope_scaling import (
    RopeScaling,
    RopeScalingError,
    linear,
    llama3,
    yarn,
)
from tidegate_engine.model.rotary import RotaryTable
from tidegate_testing.models import TINY

HEAD_SIZE = 64
THETA = 10_000.0
ORIGINAL = 2048


def turns(pair: int) -> float:
    """How often a pair of elements turns within the original context."""
    return float(ORIGINAL * THETA ** (-2 * pair / HEAD_SIZE) / math.tau)


def test_linear_divides_every_frequency() -> None:
    assert linear(4.0, head_size=8) == RopeScaling((4.0,) * 4)


def test_llama3_keeps_the_fast_divides_the_slow_and_blends_between() -> None:
    divisors = llama3(
        8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_tokens=ORIGINAL,
        rope_theta=THETA,
        head_size=HEAD_SIZE,
    ).divisors
    assert len(divisors) == HEAD_SIZE // 2
    for pair, divisor in enumerate(divisors):
        if turns(pair) >= 4:
            assert divisor == 1.0
        elif turns(pair) <= 1:
            assert divisor == 8.0
        else:
            kept = (turns(pair) - 1) / 3
            assert 1 / divisor == pytest.approx(kept + (1 - kept) / 8)
    assert {1.0, 8.0} < {*divisors}
    assert [*divisors] == sorted(divisors)


def test_yarn_keeps_the_fast_divides_the_slow_and_sharpens_scores() -> None:
    scaling = yarn(4.0, original_context_tokens=ORIGINAL, rope_theta=THETA, head_size=HEAD_SIZE)
    for pair, divisor in enumerate(scaling.divisors):
        if turns(pair + 1) > 32:
            assert divisor == 1.0
        if turns(pair - 1) < 1:
            assert divisor == 4.0
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_takes_the_attention_factor_that_a_model_states() -> None:
    scaling = yarn(
        4.0,
        original_context_tokens=ORIGINAL,
        rope_theta=THETA,
        head_size=HEAD_SIZE,
        attention_factor=1.5,
    )
    assert scaling.attention_factor == 1.5


def test_a_stretched_table_turns_slower_and_is_as_much_larger() -> None:
    plain = RotaryTable.of(TINY, torch.empty(0))
    scaling = RopeScaling((4.0,) * 4, attention_factor=1.25)
    table = RotaryTable.of(dataclasses.replace(TINY, rope_scaling=scaling), torch.empty(0))
    assert torch.allclose(table.cos[::4], plain.cos[:128] * 1.25, atol=1e-6)
    assert torch.allclose(table.sin[::4], plain.sin[:128] * 1.25, atol=1e-6)


@pytest.mark.parametrize(
    ("field", "numbers"),
    [
        ("factor", {"factor": 0.0}),
        ("high_freq_factor", {"high_freq_factor": 1.0}),
        ("original_context_tokens", {"original_context_tokens": 0}),
    ],
)
def test_numbers_that_make_no_sense_are_refused_by_name(
    field: str, numbers: dict[str, float]
) -> None:
    sound = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_tokens": ORIGINAL,
        "rope_theta": THETA,
        "head_size": HEAD_SIZE,
    }
    with pytest.raises(RopeScalingError, match=field) as caught:
        llama3(**{**sound, **numbers})  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan])
def test_divisors_must_be_above_0(number: float) -> None:
    with pytest.raises(RopeScalingError, match="divisors must be above 0"):
        RopeScaling((1.0, number))


def test_there_must_be_a_divisor_for_every_pair() -> None:
    with pytest.raises(ModelConfigError, match="rope_scaling must have 4 divisors"):
        dataclasses.replace(TINY, rope_scaling=RopeScaling((1.0, 2.0)))
