from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.fairness import VirtualTokenCounters


def test_a_heavier_tenant_is_charged_less_per_token() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 100, weight=1)
    counters.charge("b", 100, weight=2)
    assert (counters.value("a"), counters.value("b")) == (100, 50)


def test_idle_time_is_not_banked_while_others_are_active() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 1000, weight=1)
    counters.charge("c", 3000, weight=1)
    counters.join("b", tier=0, active=["a", "c", "b"])
    assert counters.value("b") == 1000


def test_idle_time_is_not_banked_when_nobody_is_active() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 1000, weight=1)
    counters.leave("a", tier=0)
    counters.join("b", tier=0, active=[])
    assert counters.value("b") == 1000


def test_joining_never_lowers_a_counter() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 10, weight=1)
    counters.charge("b", 500, weight=1)
    counters.join("b", tier=0, active=["a"])
    assert counters.value("b") == 500


def test_a_tenant_that_changes_tier_starts_level_there() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 40, weight=1)
    counters.charge("b", 90_000, weight=1)
    counters.move("b", tier=7, active=["a", "b"])
    assert counters.value("b") == 40


def test_a_forgotten_tenant_leaves_no_floor_behind() -> None:
    counters = VirtualTokenCounters()
    counters.charge("a", 40, weight=1)
    counters.leave("a", tier=0)
    counters.forget("a")
    counters.join("b", tier=0, active=[])
    assert (counters.value("a"), counters.value("b")) == (0, 0)


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
