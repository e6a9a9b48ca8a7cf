import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.preemption import (
    Mode,
    ModeChoice,
    Shield,
    VictimCandidate,
    choose_pressure_victim,
    plan_victims,
    shield,
)
from tidegate_policies.rules import PreemptionMode, PreemptionRule


def candidate(name: str, **changes: Any) -> VictimCandidate:
    plain = VictimCandidate(
        request_id=name,
        tenant="batch",
        tier_value=0,
        over_share=1.0,
        backlog=2.0,
        blocks=10,
        seconds=1.0,
        admission=1,
    )
    return replace(plain, **changes)


def frees(blocks: int) -> Callable[[Sequence[VictimCandidate]], bool]:
    return lambda victims: sum(victim.blocks for victim in victims) >= blocks


def planned(blocks: int, *candidates: VictimCandidate) -> list[str] | None:
    victims = plan_victims(candidates, is_enough=frees(blocks))
    return None if victims is None else [victim.request_id for victim in victims]


def test_nobody_leaves_when_nothing_is_lacking() -> None:
    assert planned(0, candidate("a")) == []
    assert planned(0) == []


def test_nobody_leaves_when_all_together_are_not_enough() -> None:
    assert planned(21, candidate("a"), candidate("b")) is None
    assert planned(1) is None


@pytest.mark.parametrize(
    "first",
    [
        {"tier_value": -1, "over_share": 0.0, "seconds": 9.0},
        {"over_share": 1.5, "backlog": 0.0, "seconds": 9.0},
        {"over_share": inf, "seconds": 9.0},
        {"backlog": 3.0, "seconds": 9.0, "admission": 0},
        {"backlog": inf, "seconds": 9.0},
        {"seconds": 0.5, "admission": 0},
        {"blocks": 20, "seconds": 1.5, "admission": 0},
        {"admission": 2},
        {"request_id": "a"},
    ],
)
def test_the_lowest_the_most_over_share_the_longest_queued_the_cheapest_the_newest_yields_first(
    first: dict[str, Any],
) -> None:
    yielding = candidate("z", **first)
    assert planned(1, candidate("b"), yielding) == [yielding.request_id]
    assert planned(1, yielding, candidate("b")) == [yielding.request_id]


def test_a_request_that_frees_nothing_yields_after_those_that_free_something() -> None:
    nothing, something = candidate("nothing", blocks=0, seconds=0.0), candidate("something")
    assert plan_victims([nothing, something], is_enough=bool) == (something,)


def test_eight_requests_of_ten_blocks_yield_two_for_twelve() -> None:
    batch = [candidate(f"b{n}", admission=n) for n in range(8)]
    assert planned(12, *batch) == ["b7", "b6"]


def test_no_more_equals_yield_than_it_takes() -> None:
    equals = [candidate(f"r{n}") for n in range(9)]
    for needed in range(10):
        assert planned(10 * needed, *equals) == [f"r{n}" for n in range(needed)]


def test_a_victim_without_whom_it_is_enough_stays() -> None:
    small = candidate("small", tier_value=-1, blocks=3)
    large = candidate("large", blocks=12)
    assert planned(12, small, large) == ["large"]


def test_of_two_victims_that_are_not_needed_the_costlier_stays() -> None:
    cheap = candidate("cheap", blocks=6, seconds=0.1)
    costly = candidate("costly", blocks=6, seconds=0.5)
    large = candidate("large", blocks=8, seconds=5.0)
    assert planned(14, cheap, costly, large) == ["cheap", "large"]


def test_a_higher_tier_stays_before_a_costlier_lower_one() -> None:
    low = candidate("low", tier_value=-1, blocks=6, seconds=9.0)
    high = candidate("high", blocks=6, seconds=0.1)
    large = candidate("large", blocks=8, seconds=5.0)
    assert planned(14, low, high, large) == ["low", "large"]


@given(
    st.lists(
        st.builds(
            VictimCandidate,
            request_id=st.uuids().map(str),
            tenant=st.sampled_from(["a", "b"]),
            tier_value=st.integers(-1, 1),
            over_share=st.sampled_from([0.5, 2.0, inf]),
            backlog=st.sampled_from([0.0, 1.5]),
            blocks=st.integers(0, 12),
            seconds=st.sampled_from([0.0, 0.1, 2.0]),
            admission=st.integers(0, 3),
        ),
        max_size=8,
        unique_by=lambda victim: victim.request_id,
    ),
    st.integers(0, 40),
    st.integers(0, 3),
)
def test_a_plan_suffices_and_no_part_of_it_does(
    candidates: list[VictimCandidate], blocks: int, slots: int
) -> None:
    def is_enough(victims: Sequence[VictimCandidate]) -> bool:
        return frees(blocks)(victims) and len(victims) >= slots

    victims = plan_victims(candidates, is_enough=is_enough)
    if victims is None:
        assert not is_enough(candidates)
        return
    assert is_enough(victims)
    assert not any(
        is_enough(part) for size in range(len(victims)) for part in combinations(victims, size)
    )
    assert plan_victims(candidates[::-1], is_enough=is_enough) == victims


def test_a_plan_for_a_thousand_candidates_takes_few_simulations() -> None:
    candidates = [candidate(f"r{n}", admission=n) for n in range(1000)]
    sizes: list[int] = []

    def is_enough(victims: Sequence[VictimCandidate]) -> bool:
        sizes.append(len(victims))
        return frees(200)(victims)

    victims = plan_victims(candidates, is_enough=is_enough)
    assert victims is not None
    assert len(victims) == 20
    assert len(sizes) <= 30
    assert max(sizes) <= 2 * len(victims)


def test_under_pressure_the_newest_of_the_most_over_share_tenant_of_the_lowest_tier_yields() -> (
    None
):
    high = candidate("high", tier_value=5, over_share=90.0, admission=9)
    light = candidate("light", over_share=6.0, admission=7)
    old = candidate("old", over_share=8.0, admission=3)
    new = candidate("new", over_share=8.0, admission=5, seconds=99.0)
    assert choose_pressure_victim([high, light, old, new]) is new
    assert choose_pressure_victim([new, old, light, high]) is new
    assert choose_pressure_victim([high]) is high
    with pytest.raises(ValueError, match="empty"):
        choose_pressure_victim([])


def shield_of(**changes: Any) -> Shield:
    """Ask about a decode that nothing protects, with these differences."""
    plain: dict[str, Any] = {
        "rule": PreemptionRule(max_preemptions=3, min_quantum_tokens=16),
        "preemptions": 2,
        "produced_since_admission": 16,
        "is_prefilling": False,
        "computed_share": 0.0,
        "remaining_tokens": 9,
        "under_floor": False,
    }
    assert plain.keys() == inspect.signature(shield).parameters.keys()
    return shield(**(plain | changes))


def test_a_decode_past_its_quantum_is_not_protected() -> None:
    assert shield_of() is Shield.NONE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rule": PreemptionRule(preemptible=False)}, Shield.NOT_PREEMPTIBLE),
        ({"preemptions": 3}, Shield.AT_CAP),
        ({"under_floor": True}, Shield.UNDER_FLOOR),
        ({"produced_since_admission": 15}, Shield.IN_QUANTUM),
        ({"remaining_tokens": 8}, Shield.ABOUT_TO_FINISH),
        ({"is_prefilling": True, "computed_share": 0.75}, Shield.PREFILL_NEARLY_DONE),
    ],
)
def test_each_reason_protects_by_itself(changes: dict[str, Any], reason: Shield) -> None:
    assert shield_of(**changes) is reason


def test_a_long_prefill_holds_its_slot_only_near_its_end() -> None:
    early = {"is_prefilling": True, "produced_since_admission": 0, "computed_share": 0.74}
    assert shield_of(**early) is Shield.NONE
    assert shield_of(**early, remaining_tokens=1) is Shield.NONE
    assert shield_of(**early, under_floor=True) is Shield.UNDER_FLOOR


class Engine:
    """A `ModeChoice` with host room and the wish `Auto`, unless told otherwise."""

    def __init__(self) -> None:
        self._choice = ModeChoice()

    def mode(
        self,
        swap: float,
        recompute: float,
        wish: PreemptionMode = PreemptionMode.AUTO,
        *,
        has_host_room: bool = True,
    ) -> Mode:
        return self._choice.choose(
            wish, swap_seconds=swap, recompute_seconds=recompute, has_host_room=has_host_room
        )


def test_a_wish_is_obeyed_whatever_it_costs() -> None:
    engine = Engine()
    assert engine.mode(9.0, 1.0, PreemptionMode.SWAP) is Mode.SWAP
    assert engine.mode(1.0, 9.0, PreemptionMode.RECOMPUTE) is Mode.RECOMPUTE


@pytest.mark.parametrize("wish", list(PreemptionMode))
def test_without_host_room_a_victim_is_recomputed(wish: PreemptionMode) -> None:
    assert Engine().mode(1.0, 9.0, wish, has_host_room=False) is Mode.RECOMPUTE


def test_the_first_choice_is_the_cheaper() -> None:
    assert Engine().mode(1.0, 1.01) is Mode.SWAP
    assert Engine().mode(1.01, 1.0) is Mode.RECOMPUTE
    assert Engine().mode(1.0, 1.0) is Mode.RECOMPUTE


def test_the_leaning_changes_only_when_the_other_is_cheaper_by_a_fifth() -> None:
    engine = Engine()
    assert engine.mode(1.0, 2.0) is Mode.SWAP
    assert engine.mode(1.0, 0.81) is Mode.SWAP
    assert engine.mode(1.0, 0.79) is Mode.RECOMPUTE
    assert engine.mode(0.81, 1.0) is Mode.RECOMPUTE
    assert engine.mode(0.79, 1.0) is Mode.SWAP
    assert engine.mode(0.0, 0.0) is Mode.SWAP


def test_wishes_leave_the_leaning_alone() -> None:
    engine = Engine()
    engine.mode(1.0, 2.0)
    engine.mode(9.0, 1.0, PreemptionMode.RECOMPUTE)
    assert engine.mode(1.0, 0.9) is Mode.SWAP
