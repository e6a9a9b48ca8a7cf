import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.admission import PredictedPeak, Watermark, WatermarkGate
from tidegate_policies.rules import WatermarkRule

GREEN, YELLOW, RED = Watermark.GREEN, Watermark.YELLOW, Watermark.RED


def gate_of(*, low: int, high: int, num_blocks: int) -> WatermarkGate:
    return WatermarkGate(WatermarkRule(low_percent=low, high_percent=high), num_blocks=num_blocks)


def test_the_gate_follows_usage_and_red_lasts_down_to_the_low_watermark() -> None:
    gate = gate_of(low=50, high=90, num_blocks=100)
    seen = [gate.observe(used) for used in (0, 49, 50, 89, 90, 60, 51, 50, 48)]
    assert seen == [GREEN, GREEN, YELLOW, YELLOW, RED, RED, RED, YELLOW, GREEN]


def test_a_closed_gate_opens_only_one_percent_of_the_pool_below_where_it_closed() -> None:
    gate = gate_of(low=50, high=90, num_blocks=1000)
    seen = [gate.observe(used) for used in (499, 500, 499, 490, 489, 499)]
    assert seen == [GREEN, YELLOW, YELLOW, YELLOW, GREEN, GREEN]


def test_after_red_too_the_gate_opens_only_one_percent_below() -> None:
    gate = gate_of(low=50, high=90, num_blocks=1000)
    assert [gate.observe(used) for used in (900, 499, 489)] == [RED, YELLOW, GREEN]
    assert [gate.observe(used) for used in (900, 489)] == [RED, GREEN]


def test_in_a_pool_under_a_hundred_blocks_the_gate_opens_right_below_the_low_watermark() -> None:
    gate = gate_of(low=50, high=90, num_blocks=99)
    assert [gate.observe(used) for used in (49, 48)] == [YELLOW, GREEN]


def test_in_a_small_pool_the_levels_stay_apart() -> None:
    gate = gate_of(low=80, high=81, num_blocks=50)
    assert [gate.observe(used) for used in (40, 41)] == [YELLOW, RED]


@given(st.integers(1, 300), st.integers(1, 98), st.integers(1, 98))
def test_an_empty_pool_is_green_whatever_it_was_before(num_blocks: int, a: int, b: int) -> None:
    gate = gate_of(low=min(a, b), high=max(a, b) + 1, num_blocks=num_blocks)
    for before in (0, gate.low_blocks, gate.high_blocks):
        gate.observe(before)
        assert gate.observe(0) is GREEN


def test_a_changed_rule_counts_from_the_next_look_on() -> None:
    gate = gate_of(low=50, high=90, num_blocks=100)
    assert gate.observe(60) is YELLOW
    gate.apply_rule(WatermarkRule(low_percent=70, high_percent=90))
    assert gate.state is YELLOW
    assert gate.observe(60) is GREEN


REQUESTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=12)


def peak_of(occupied: list[int], remaining: list[int]) -> int:
    return PredictedPeak(occupied, remaining).tokens


@given(REQUESTS, st.integers(0, 60), st.integers(0, 40))
def test_the_peak_with_one_more_is_the_peak_of_all(
    requests: list[tuple[int, int]], occupied: int, remaining: int
) -> None:
    together = [*requests, (occupied, remaining)]
    peak = PredictedPeak([held for held, _ in requests], [left for _, left in requests])
    assert len(peak) == len(requests)
    assert peak.with_one_more(occupied, remaining) == peak_of(
        [held for held, _ in together], [left for _, left in together]
    )


@given(REQUESTS)
def test_the_predicted_peak_is_what_a_simulation_of_growth_reaches(
    requests: list[tuple[int, int]],
) -> None:
    running = requests
    peak = 0
    while running:
        peak = max(peak, sum(held for held, _ in running))
        running = [(held + 1, left - 1) for held, left in running if left > 0]
    predicted = peak_of([held for held, _ in requests], [left for _, left in requests])
    assert predicted == peak


def test_the_peak_may_come_before_the_longest_request_ends() -> None:
    assert peak_of([100, 10], [5, 50]) == 110 + 2 * 5
    assert peak_of([], []) == 0


def test_a_peak_of_requests_with_unknown_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="1 lengths for the 2 requests"):
        peak_of([1, 2], [1])
