from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.fairness import VirtualTokenCounters

TIER = (0, False)


def test_a_heavier_tenant_is_charged_less_per_token() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 100, weight=1)
    counters.charge("b", 100, weight=2)
    assert (counters.value("a"), counters.value("b")) == (100, 50)


def test_idle_time_is_not_banked_while_others_are_active() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 1000, weight=1)
    counters.charge("c", 3000, weight=1)
    counters.join("b", TIER, backlogged=["a", "c", "b"])
    assert counters.value("b") == 1000


def test_idle_time_is_not_banked_when_nobody_is_active() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 1000, weight=1)
    counters.leave("a", TIER)
    counters.join("b", TIER, backlogged=[])
    assert counters.value("b") == 1000


def test_joining_never_lowers_a_counter() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 10, weight=1)
    counters.charge("b", 500, weight=1)
    counters.join("b", TIER, backlogged=["a"])
    assert counters.value("b") == 500


def test_a_tenant_that_changes_tier_starts_level_there() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 40, weight=1)
    counters.charge("b", 90_000, weight=1)
    counters.move("b", (7, False), backlogged=["a", "b"])
    assert counters.value("b") == 40


def test_what_happens_in_one_tier_is_no_floor_in_another() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 40, weight=1)
    counters.leave("a", TIER)
    counters.move("a", (7, False), backlogged=[])
    counters.charge("a", 9000, weight=1)
    counters.join("b", TIER, backlogged=[])
    counters.join("c", (8, False), backlogged=[])
    assert (counters.value("b"), counters.value("c")) == (40, 0)


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
