import heapq
from collections.abc import Iterable
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.tiers import TierShares

GOLD, BATCH = 10, -1


def test_a_share_is_of_all_that_was_charged() -> None:
    shares = TierShares()
    shares.charge(GOLD, 30.0, now=5.0)
    shares.charge(BATCH, 10.0, now=5.0)
    assert shares.share(GOLD, now=5.0) == 0.75
    assert shares.share(BATCH, now=5.0) == 0.25
    assert shares.share(7, now=5.0) == 0.0


def test_nobody_has_a_share_when_nothing_was_charged() -> None:
    assert TierShares().share(GOLD, now=1.0) == 0.0


def closed_form(charges: Iterable[tuple[float, int, float]], tier: int, now: float) -> float:
    return sum(cost * exp((at - now) / 60) for at, charged, cost in charges if charged == tier)


@given(
    st.lists(
        st.tuples(st.floats(0, 40), st.sampled_from([GOLD, 0, BATCH]), st.floats(0.1, 1000)),
        min_size=1,
        max_size=30,
    ),
    st.floats(0, 100),
)
def test_shares_follow_the_closed_form_of_the_exponential_mean(
    moves: list[tuple[float, int, float]], pause: float
) -> None:
    shares = TierShares(window_seconds=60.0)
    now = 1000.0
    charges = []
    for wait, tier, cost in moves:
        now += wait
        shares.charge(tier, cost, now)
        charges.append((now, tier, cost))
    now += pause
    faded = {tier: closed_form(charges, tier, now) for tier in (GOLD, 0, BATCH)}
    for tier, service in faded.items():
        assert shares.share(tier, now) == pytest.approx(service / sum(faded.values()), rel=1e-9)
    # Committed cost doesn't fade: it weighs what is left of the service in absolute terms.
    left = sum(faded.values())
    for committed, is_below in ((0.999 * left, True), (1.001 * left, False)):
        assert is_below == shares.is_below_floor(
            7, reserved_percent=50, now=now, committed={7: committed}
        )


def test_a_clock_that_steps_back_counts_as_no_time_passed() -> None:
    stepping, steady = TierShares(), TierShares()
    for shares, between in ((stepping, 9.5), (steady, 10.0)):
        shares.charge(GOLD, 5.0, now=10.0)
        shares.charge(BATCH, 5.0, now=between)
        shares.charge(BATCH, 5.0, now=30.0)
    assert stepping.share(GOLD, now=29.0) == steady.share(GOLD, now=30.0)


def test_after_long_idleness_old_service_weighs_nothing() -> None:
    shares = TierShares()
    shares.charge(BATCH, 1e12, now=0.0)
    shares.charge(GOLD, 1.0, now=1e9)
    assert shares.share(GOLD, now=1e9) == 1.0
    assert shares.share(GOLD, now=1e300) == 0.0
    assert shares.is_below_floor(GOLD, reserved_percent=1, now=1e300, committed={})


def test_a_floor_counts_what_is_still_to_be_served() -> None:
    shares = TierShares()
    shares.charge(GOLD, 90.0, now=0.0)

    def is_below(committed: dict[int, float]) -> bool:
        return shares.is_below_floor(BATCH, reserved_percent=10, now=0.0, committed=committed)

    assert is_below({})
    assert is_below({BATCH: 9.9})
    assert not is_below({BATCH: 10.0})
    assert is_below({BATCH: 10.0, GOLD: 1.0})


def test_service_fades_against_what_is_still_to_be_served() -> None:
    shares = TierShares(window_seconds=60.0)
    shares.charge(BATCH, 100.0, now=0.0)
    for now, is_below in ((0.0, False), (60.0, True)):
        assert is_below == shares.is_below_floor(
            BATCH, reserved_percent=50, now=now, committed={GOLD: 50.0}
        )


def test_a_floor_of_a_tier_before_any_service_is_not_reached() -> None:
    shares = TierShares()
    assert shares.is_below_floor(BATCH, reserved_percent=1, now=0.0, committed={})
    assert not shares.is_below_floor(BATCH, reserved_percent=0, now=0.0, committed={})


def test_a_floor_of_nothing_is_never_missed() -> None:
    shares = TierShares()
    shares.charge(GOLD, 90.0, now=0.0)
    assert not shares.is_below_floor(BATCH, reserved_percent=0, now=0.0, committed={GOLD: 5.0})


class TwoTiers:
    """64 slots, both tiers always backlogged, a token per slot and step; no preemption."""

    STEP_SECONDS = 0.02

    def __init__(self, *, floor_percent: int, batch_tokens: int, gold_tokens: int) -> None:
        self._floor_percent = floor_percent
        self._length = {BATCH: batch_tokens, GOLD: gold_tokens}
        self._shares = TierShares()
        self._committed = {GOLD: 0.0, BATCH: 0.0}
        self._running = {GOLD: 0, BATCH: 0}
        self._ends: list[tuple[int, int]] = []
        self._admitted = 0
        self.served = {GOLD: 0, BATCH: 0}

    def run(self, seconds: float) -> None:
        for step in range(round(seconds / self.STEP_SECONDS)):
            now = step * self.STEP_SECONDS
            while self._ends and self._ends[0][0] <= step:
                self._running[heapq.heappop(self._ends)[1]] -= 1
            while len(self._ends) < 64:
                self._admit(step, now)
            for tier, tokens in self._running.items():
                self._shares.charge(tier, tokens, now)
                self._committed[tier] -= tokens
                self.served[tier] += tokens

    def _admit(self, step: int, now: float) -> None:
        is_below = self._shares.is_below_floor(
            BATCH, reserved_percent=self._floor_percent, now=now, committed=self._committed
        )
        tier = BATCH if is_below else GOLD
        # Lengths vary by half around the mean, so that slots fall free one by one.
        tokens = self._length[tier] * (50 + self._admitted * 37 % 101) // 100
        self._admitted += 1
        heapq.heappush(self._ends, (step + tokens, tier))
        self._running[tier] += 1
        self._committed[tier] += tokens


@pytest.mark.parametrize(("batch_tokens", "gold_tokens"), [(300, 300), (600, 200), (200, 600)])
def test_a_tier_with_a_floor_gets_it_against_a_backlogged_higher_tier(
    batch_tokens: int, gold_tokens: int
) -> None:
    engine = TwoTiers(floor_percent=10, batch_tokens=batch_tokens, gold_tokens=gold_tokens)
    engine.run(600.0)
    assert engine.served[BATCH] / sum(engine.served.values()) == pytest.approx(0.10, abs=0.02)


def test_a_tier_without_a_floor_gets_nothing_against_a_backlogged_higher_tier() -> None:
    engine = TwoTiers(floor_percent=0, batch_tokens=300, gold_tokens=300)
    engine.run(600.0)
    assert engine.served[BATCH] == 0
