import math

import pytest

from tidegate_engine.core.sampling import SamplingParams, SamplingParamsError


def test_defaults_draw_from_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, None)
    assert not params.is_greedy


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", 0),
        ("seed", -1),
        ("seed", 1 << 64),
        ("logprobs", -1),
        ("logprobs", 6),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(parameter: str, value: float) -> None:
    with pytest.raises(SamplingParamsError, match=parameter) as caught:
        SamplingParams(**{parameter: value})  # type: ignore[arg-type]
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", 2.0),
        ("top_p", 1.0),
        ("top_k", 1),
        ("seed", (1 << 64) - 1),
        ("logprobs", 0),
        ("logprobs", 5),
    ],
)
def test_the_limits_themselves_are_allowed(parameter: str, value: float) -> None:
    params = SamplingParams(**{parameter: value})  # type: ignore[arg-type]
    assert getattr(params, parameter) == value
