from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.fairness import PromptPrice, VirtualTokenCounters

TIER = (0, False)


def test_a_heavier_tenant_is_charged_less_per_token() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 100, weight=1)
    counters.charge("b", 100, weight=2)
    assert (counters.value("a"), counters.value("b")) == (100, 50)


def test_idle_time_is_not_banked_while_others_are_active() -> None:
    counters = VirtualTokenCounters()
    counters.join("a", TIER)
    counters.join("c", TIER)
    counters.charge("a", 1000, weight=1)
    counters.charge("c", 3000, weight=1)
    counters.join("b", TIER)
    assert counters.value("b") == 1000


def test_idle_time_is_not_banked_when_nobody_is_active() -> None:
    counters = VirtualTokenCounters()
    counters.join("a", TIER)
    counters.charge("a", 1000, weight=1)
    counters.leave("a", TIER)
    counters.join("b", TIER)
    assert counters.value("b") == 1000


def test_joining_never_lowers_a_counter() -> None:
    counters = VirtualTokenCounters()
    counters.join("a", TIER)
    counters.charge("a", 10, weight=1)
    counters.charge("b", 500, weight=1)
    counters.join("b", TIER)
    assert counters.value("b") == 500


def test_a_tenant_that_changes_tier_starts_level_there() -> None:
    counters = VirtualTokenCounters()
    counters.join("a", (7, False))
    counters.charge("a", 40, weight=1)
    counters.charge("b", 90_000, weight=1)
    counters.move("b", (7, False))
    assert counters.value("b") == 40


def test_what_happens_in_one_tier_is_no_floor_in_another() -> None:
    counters = VirtualTokenCounters()
    counters.join("a", TIER)
    counters.charge("a", 40, weight=1)
    counters.leave("a", TIER)
    counters.move("a", (7, False))
    counters.charge("a", 9000, weight=1)
    counters.join("b", TIER)
    counters.join("c", (8, False))
    assert (counters.value("b"), counters.value("c")) == (40, 0)


def test_whom_its_own_limit_keeps_back_lends_a_newcomer_nothing() -> None:
    counters = VirtualTokenCounters()
    for tenant in ("held", "busy"):
        counters.join(tenant, TIER)
    counters.charge("busy", 700, weight=1)
    counters.suspend("held", TIER)
    counters.join("new", TIER)
    assert counters.value("new") == 700
    counters.leave("new", TIER)
    counters.readmit("held", TIER)
    counters.join("newer", TIER)
    assert counters.value("newer") == 0


def test_a_newcomer_beside_suspended_tenants_alone_starts_level_with_them() -> None:
    counters = VirtualTokenCounters()
    counters.join("capped", TIER)
    counters.charge("capped", 90, weight=1)
    counters.suspend("capped", TIER)
    counters.join("new", TIER)
    assert counters.value("new") == 90


def test_a_suspended_tenants_old_counter_is_no_floor_under_who_left_last() -> None:
    counters = VirtualTokenCounters()
    counters.join("held", TIER)
    counters.suspend("held", TIER)
    counters.join("busy", TIER)
    counters.charge("busy", 700, weight=1)
    counters.leave("busy", TIER)
    counters.join("new", TIER)
    assert counters.value("new") == 700


class PayingTenant(NamedTuple):
    account: str
    output_price: float


def test_output_is_charged_at_the_price_of_who_pays() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 3.0, weight=1)
    counters.charge_output({PayingTenant("a", 0.5): 2, PayingTenant("b", 2.0): 2})
    assert (counters.value("a"), counters.value("b")) == (4.0, 4.0)


@given(st.lists(st.tuples(st.sampled_from("jlc"), st.sampled_from("abcd")), max_size=60))
def test_a_newcomer_is_lifted_to_the_least_active_counter(moves: list[tuple[str, str]]) -> None:
    counters, active = VirtualTokenCounters(), set[str]()
    for kind, tenant in moves:
        if kind == "c":
            counters.charge(tenant, 10 + ord(tenant), weight=1)
        elif kind == "l" and tenant in active:
            active.remove(tenant)
            counters.leave(tenant, TIER)
        elif kind == "j" and tenant not in active:
            before = counters.value(tenant)
            floor = min((counters.value(other) for other in active), default=None)
            counters.join(tenant, TIER)
            active.add(tenant)
            if floor is not None:
                assert counters.value(tenant) == max(before, floor)
            assert counters.value(tenant) >= before


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=200),
    st.sampled_from([(1, 1), (1, 2), (3, 7)]),
)
def test_backlogged_tenants_stay_within_one_request(
    sizes: list[int], weights: tuple[int, int]
) -> None:
    """Theorem of the paper: normalised service differs by at most the largest request."""
    counters = VirtualTokenCounters()
    by_name = dict(zip("ab", weights, strict=True))
    for size in sizes:
        least = min("ab", key=counters.value)
        counters.charge(least, size, weight=by_name[least])
    assert abs(counters.value("a") - counters.value("b")) <= max(sizes) / min(weights)


def test_a_newcomer_is_lifted_to_who_wants_service_elsewhere() -> None:
    counters = VirtualTokenCounters()
    counters.charge("far", 500, weight=1)
    counters.note_elsewhere([("far", TIER)])
    counters.join("new", TIER)
    assert counters.value("new") == 500


def test_who_wants_service_elsewhere_is_no_newcomer_here() -> None:
    counters = VirtualTokenCounters()
    counters.join("here", TIER)
    counters.note_elsewhere([("spread", TIER)])
    counters.charge("here", 900, weight=1)
    counters.charge("spread", 100, weight=1)
    counters.note_elsewhere([("spread", TIER)])
    counters.join("spread", TIER)
    assert counters.value("spread") == 100


def test_who_is_not_named_any_more_wants_nothing_elsewhere() -> None:
    counters = VirtualTokenCounters()
    counters.charge("far", 500, weight=1)
    counters.note_elsewhere([("far", TIER)])
    counters.note_elsewhere([])
    counters.join("new", TIER)
    assert counters.value("new") == 0


def test_who_begins_to_want_service_elsewhere_pulls_nobody_down() -> None:
    counters = VirtualTokenCounters()
    counters.join("old", TIER)
    counters.charge("old", 900, weight=1)
    counters.note_elsewhere([("light", TIER)])
    counters.join("new", TIER)
    assert counters.value("new") == 900


def test_prompt_tokens_cost_the_more_the_more_they_attend_to() -> None:
    price = PromptPrice(pair_cost=0.5)
    assert price.of(0, 3) == 3 + 0.5 * (1 + 2 + 3)
    assert price.of(0, 3) + price.of(3, 2) == price.of(0, 5)
    assert PromptPrice().of(1000, 7) == 7
