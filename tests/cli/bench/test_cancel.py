import pytest

from tidegate_cli.bench.cancel import CancelBench, CancelSettings, Freed, freed
from tidegate_cli.bench.cancel_target import StepSeen
from tidegate_cli.bench.errors import BenchError
from tidegate_engine.events import CancelCause, CancelKey

KEYS = {
    "p99_steps_to_free",
    "tokens_after_cancel",
    "cancels",
    "p50_ms_to_free",
    "p99_ms_to_free",
    "step_ms",
}


def steps(*holders: str) -> list[StepSeen]:
    """One step a second, each of 0.9 s, with the tenants that hold KV when it begins."""
    return [
        StepSeen(float(second), frozenset(names.split()), ended_at=second + 0.9)
        for second, names in enumerate(holders)
    ]


@pytest.mark.parametrize(
    ("left_at", "expected"),
    [
        pytest.param(0.5, 3, id="in flight, two more held it"),
        pytest.param(0.95, 2, id="between two steps"),
        pytest.param(2.5, 1, id="in flight, the next was without it"),
        pytest.param(2.95, 0, id="between two steps, the next was without it"),
    ],
)
def test_steps_in_flight_and_those_begun_with_its_kv_count(left_at: float, expected: int) -> None:
    seen = steps("a b", "a b", "a b", "b", "b")
    found = freed(seen, "a", way="closed", left_at=left_at)
    assert found == Freed(way="closed", steps=expected, seconds=3 - left_at)


def test_nothing_is_known_before_a_step_begins_without_its_kv() -> None:
    assert freed(steps("a", "a"), "a", way="closed", left_at=0.5) is None


def test_a_cancel_that_the_engine_did_not_count_is_told() -> None:
    key = CancelKey(tenant="caller-0", cause=CancelCause.DELETE, state="running")
    with pytest.raises(BenchError, match="0 requests were ended by delete; 1 were counted"):
        CancelBench._check_counts([], {key: 1})


@pytest.mark.model
def test_a_small_run_gives_every_key_and_leaves_no_tokens() -> None:
    settings = CancelSettings(
        cancels=3, callers=3, others=1, long_prompt_tokens=300, max_output_tokens=100, kv_blocks=256
    )
    result = CancelBench(settings, lambda _line: None).run()
    assert set(result.results) == KEYS
    assert result.results["cancels"] == 3
    assert result.results["tokens_after_cancel"] == 0
    assert result.results["p99_steps_to_free"] <= 2
    assert len(result.series["ms_to_free"]) == 3
