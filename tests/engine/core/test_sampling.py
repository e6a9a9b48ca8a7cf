import math

import pytest

from tidegate_engine.core.sampling import SamplingContext, SamplingParams, SamplingParamsError


def test_defaults_draw_from_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, None)


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
        ("logprobs", 21),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-60),
        ("repetition_penalty", 10.1),
        ("repetition_penalty", math.nan),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("min_tokens", -1),
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
        ("logprobs", 20),
        ("min_p", 1.0),
        ("repetition_penalty", 10.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
    ],
)
def test_the_limits_themselves_are_allowed(parameter: str, value: float) -> None:
    params = SamplingParams(**{parameter: value})  # type: ignore[arg-type]
    assert getattr(params, parameter) == value


@pytest.mark.parametrize("bias", [(3, 100.5), (3, math.nan), (-1, 1.0)])
def test_a_bias_out_of_range_is_refused(bias: tuple[int, float]) -> None:
    with pytest.raises(SamplingParamsError, match="logit_bias"):
        SamplingParams(logit_bias=(bias,))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((1, 2.0),)},
        {"min_tokens": 1},
    ],
)
def test_what_changes_logits_is_told_apart_from_what_does_not(fields: dict[str, float]) -> None:
    assert SamplingParams(**fields).edits_logits  # type: ignore[arg-type]
    assert not SamplingParams(temperature=0.3, top_p=0.5, min_p=0.1, logprobs=2).edits_logits


def test_tokens_that_end_a_request_are_barred_until_it_has_its_least_output() -> None:
    context = SamplingContext(
        params=SamplingParams(min_tokens=2),
        token_ids=[5, 6, 7, 8, 9],
        num_prompt_tokens=3,
        stop_token_ids=(1, 2),
    )
    assert [context.barred_tokens(end) for end in (3, 4, 5)] == [(1, 2), (1, 2), ()]
