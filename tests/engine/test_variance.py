import math
import random
import statistics

import pytest

from tidegate_engine.variance import DecayingVariance, TrafficVariance


def test_samples_of_one_moment_count_alike() -> None:
    draw = random.Random(3)
    samples = [draw.expovariate(1 / 200) for _ in range(500)]
    variance = DecayingVariance(300)
    for sample in samples:
        variance.observe(sample, at=5.0)
    assert variance.value(at=5.0) == pytest.approx(statistics.pvariance(samples))


def test_older_samples_weigh_less_by_the_time_between_them() -> None:
    variance = DecayingVariance(300)
    for _ in range(20):
        variance.observe(0.0, at=0.0)
    for _ in range(20):
        variance.observe(1.0, at=300.0)
    old = 1 / math.e
    share = 1 / (1 + old)
    assert variance.value(at=300.0) == pytest.approx(share * (1 - share))
    assert variance.value(at=350.0) == pytest.approx(share * (1 - share))


def test_a_variance_of_too_few_or_too_old_samples_is_none() -> None:
    variance = DecayingVariance(300)
    for _ in range(7):
        variance.observe(1.0, at=0.0)
    assert variance.value(at=0.0) is None
    variance.observe(1.0, at=0.0)
    assert variance.value(at=0.0) == 0.0
    assert variance.value(at=1.0) is None


def test_a_clock_that_stands_still_or_reads_back_loses_nothing() -> None:
    variance = DecayingVariance(300)
    for at in (10.0, 9.0, 10.0, 8.0) * 2:
        variance.observe(at, at=at)
    assert variance.value(at=7.0) == pytest.approx(statistics.pvariance([10, 9, 10, 8]))


def test_a_change_shows_in_the_minutes_long_before_it_shows_in_the_day() -> None:
    traffic = TrafficVariance()
    for second in range(40_000):
        traffic.observe(100 + second % 2, at=float(second))
    for second in range(40_000, 40_600):
        traffic.observe(100 + 20 * (second % 2), at=float(second))
    values = traffic.values(at=40_600.0)
    assert values["5m"] > 10 * values["1d"] > 0
