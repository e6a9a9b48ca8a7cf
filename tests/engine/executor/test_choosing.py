import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.choosing import Trial, best_of, describe, thread_counts, try_all


def costs(seconds: float) -> ExecutorCosts:
    return ExecutorCosts(step_seconds=seconds, prefill_token_seconds=0.0, decode_seconds=0.0)


def trials(*seconds: float) -> list[Trial[int]]:
    return try_all(range(len(seconds)), lambda way: costs(seconds[way]))


def test_the_fastest_way_is_chosen() -> None:
    assert best_of(trials(4.0, 2.0, 1.0)).way == 2
    assert best_of(trials(4.0, 1.0, 2.0)).way == 1
    assert best_of(trials(1.0)).way == 0


def test_an_earlier_way_wins_unless_a_later_one_is_faster_by_a_tenth() -> None:
    assert best_of(trials(1.0, 0.91)).way == 0
    assert best_of(trials(1.0, 0.89)).way == 1


def test_ways_are_compared_by_a_step_with_prefill_decodes_and_context() -> None:
    for field in ("prefill_token", "decode", "context_token", "prefill_pair"):
        slower = ExecutorCosts(**{f"{field}_seconds": 1.0})
        assert Trial(way=0, costs=slower).seconds > 10 * Trial(way=0, costs=ExecutorCosts()).seconds


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 3, 6]), (64, [8, 16, 32, 64])]
)
def test_all_cores_and_halves_of_them_are_tried(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_figures_are_told_in_the_order_of_the_trials() -> None:
    assert describe(trials(0.25, 0.0125), lambda way: f"way {way}") == "way 0 250 ms, way 1 12.5 ms"
