import itertools
import math
from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.attainment import (
    NEVER,
    SHORTEST_SECONDS,
    bucket_of,
    is_attained,
    measured,
    merged,
    num_counted,
    quantile,
    upper_bound,
)
from tidegate_policies.wire import Attainment, EngineReport, LatencyCounts, TenantCounters

DAY = 86_400.0

latencies = st.lists(st.floats(SHORTEST_SECONDS, DAY), min_size=1, max_size=60)
percentiles = st.integers(1, 99)


def counts_of(seconds: Iterable[float], *, target: float) -> LatencyCounts:
    seconds = list(seconds)
    return LatencyCounts(
        target_seconds=target,
        met=sum(one <= target for one in seconds),
        buckets=tuple(sorted(Counter(map(bucket_of, seconds)).items())),
    )


def an_attainment(
    ttft: Iterable[float] = (), itl: Iterable[float] = (), *, target: float = 1.0, met: int = 0
) -> Attainment:
    ttft = list(ttft)
    return Attainment(
        requests=len(ttft),
        met=met,
        ttft=counts_of(ttft, target=target),
        itl=counts_of(itl, target=0.1),
    )


def nearest_rank(seconds: Iterable[float], percentile: int) -> float:
    ordered = sorted(seconds)
    return ordered[math.ceil(percentile * len(ordered) / 100) - 1]


@given(st.floats(0, DAY))
def test_a_bucket_holds_what_is_at_most_its_bound_and_above_the_one_before(seconds: float) -> None:
    index = bucket_of(seconds)
    assert seconds <= upper_bound(index)
    assert index == 0 or upper_bound(index - 1) < seconds


def test_buckets_grow_by_a_tenth_and_end_beyond_the_longest_target() -> None:
    bounds = [upper_bound(index) for index in range(NEVER)]
    for one, next_one in itertools.pairwise(bounds):
        assert 1.0 < next_one / one < 1.101
    assert bounds[0] == SHORTEST_SECONDS
    assert bucket_of(DAY) < NEVER == bucket_of(math.inf)
    assert upper_bound(NEVER) == math.inf


@given(latencies, percentiles)
def test_a_quantile_is_at_most_a_tenth_above_the_true_one(
    seconds: list[float], percentile: int
) -> None:
    true = nearest_rank(seconds, percentile)
    found = quantile(counts_of(seconds, target=1.0).buckets, percentile)
    assert found is not None
    assert true <= found <= max(true * 1.101, SHORTEST_SECONDS)


def test_without_counts_there_is_no_quantile() -> None:
    assert quantile((), 99) is None
    assert quantile([(3, 0)], 99) is None


def test_what_never_came_is_in_the_quantile() -> None:
    buckets = [(bucket_of(0.1), 98), (NEVER, 2)]
    assert quantile(buckets, 98) == pytest.approx(0.1, rel=0.11)
    assert quantile(buckets, 99) == math.inf


@given(latencies, percentiles, st.floats(SHORTEST_SECONDS, DAY))
def test_the_measured_percentile_is_above_the_target_exactly_when_that_is_missed(
    seconds: list[float], percentile: int, target: float
) -> None:
    counts = counts_of(seconds, target=target)
    is_met = nearest_rank(seconds, percentile) <= target
    assert is_attained(counts, percentile) is is_met
    value = measured(counts, percentile)
    assert value is not None
    assert (value <= target) is is_met


@given(st.lists(latencies, min_size=1, max_size=5), percentiles)
def test_the_percentile_of_a_fleet_is_that_of_all_its_requests(
    engines: list[list[float]], percentile: int
) -> None:
    parts = [an_attainment(seconds, seconds) for seconds in engines]
    fleet = merged(parts, ttft_seconds=1.0, itl_seconds=0.1)
    alone = an_attainment(*2 * [[one for seconds in engines for one in seconds]])
    assert fleet == alone
    assert fleet is not None
    assert fleet.ttft is not None
    assert num_counted(fleet.ttft) == sum(map(len, engines))
    assert quantile(fleet.ttft.buckets, percentile) == quantile(
        counts_of([one for seconds in engines for one in seconds], target=1.0).buckets, percentile
    )


@given(st.lists(latencies, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_the_order_of_engines_makes_no_difference(
    engines: list[list[float]], random: Random
) -> None:
    parts = [an_attainment(seconds, met=1) for seconds in engines]
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert merged(parts, ttft_seconds=1.0, itl_seconds=0.1) == merged(
        shuffled, ttft_seconds=1.0, itl_seconds=0.1
    )


def test_counts_against_another_target_are_left_out() -> None:
    old, new = an_attainment([0.5] * 9, target=0.2), an_attainment([0.5], target=1.0, met=1)
    assert merged([old, new], ttft_seconds=1.0, itl_seconds=0.1) == new
    assert merged([old], ttft_seconds=1.0, itl_seconds=0.1) is None
    assert merged([new], ttft_seconds=1.0, itl_seconds=None) is None
    assert merged([], ttft_seconds=None, itl_seconds=None) is None


def test_an_attainment_travels_in_a_report() -> None:
    counters = TenantCounters(tenant="acme", attainment=an_attainment([0.3, math.inf], [0.01]))
    report = EngineReport(pool="p", pod="a", incarnation="i", sequence=1, tenants=(counters,))
    assert EngineReport.from_json(report.to_json()) == report
