"""Small requests may pass a blocked one, but not for long, and not from a lower tier."""

import pytest

from tidegate_engine.core.candidates import MAX_BACKFILL
from tidegate_engine.core.decisions import Reason, Verdict
from tidegate_testing.policies import a_tenant
from tidegate_testing.simulation import Simulation, a_simulation, admitting_by_present_need

BLOCKS = 30


@pytest.fixture
def engine() -> Simulation:
    """Half of the pool is held by a long request of another tenant."""
    policy = admitting_by_present_need(
        a_tenant("acme"),
        a_tenant("other"),
        a_tenant("low", tier="low"),
        a_tenant("owner", tier="low", kv_nominal_percent=10),
    )
    engine = a_simulation(policy, blocks=BLOCKS)
    engine.arrive("long", blocks=14, output=100, tenant="other")
    engine.step()
    return engine


def test_a_small_request_passes_a_blocked_one(engine: Simulation) -> None:
    engine.arrive("big", blocks=20, output=4)
    engine.arrive("small", blocks=1, output=4)
    assert engine.step().admitted == ("small",)
    engine.drain()
    assert engine.log.requests["big"].is_finished


@pytest.mark.parametrize(("blocked_behind", "admitted"), [(7, ("small",)), (8, ())])
def test_at_most_eight_requests_are_looked_at_behind_a_blocked_one(
    engine: Simulation, blocked_behind: int, admitted: tuple[str, ...]
) -> None:
    assert MAX_BACKFILL == 8
    for number in range(1 + blocked_behind):
        engine.arrive(f"big{number}", blocks=20, output=4)
    engine.arrive("small", blocks=1, output=4)
    assert engine.step().admitted == admitted


def test_a_request_that_was_passed_eight_times_is_passed_no_more(engine: Simulation) -> None:
    engine.arrive("big", blocks=20, output=4)
    for number in range(30):
        engine.arrive(f"small{number}", blocks=1, output=4)
        engine.step()
        assert not any(plan.admitted == ("big",) for plan in engine.plans)
    passed = [name for plan in engine.plans for name in plan.admitted if name != "long"]
    assert passed == [f"small{number}" for number in range(MAX_BACKFILL)]
    last = engine.scheduler.decision_log.of(f"small{MAX_BACKFILL}")[-1][1]
    assert (last.verdict, last.reason) == (Verdict.HELD, Reason.BEHIND_HEAD)
    engine.drain()
    admitted = [name for plan in engine.plans for name in plan.admitted]
    assert admitted.index("big") == 1 + MAX_BACKFILL
    assert all(trace.is_finished for trace in engine.log.requests.values())


def test_what_is_freed_goes_to_the_request_that_was_passed_eight_times(
    engine: Simulation,
) -> None:
    engine.arrive("big", blocks=20, output=4)
    for number in range(40):
        engine.arrive(f"small{number}", blocks=1, output=4)
    while "big" not in [name for plan in engine.plans for name in plan.admitted]:
        engine.step()
    assert engine.log.requests["long"].is_finished
    assert engine.log.requests["big"].admitted_at == pytest.approx(
        engine.log.requests["long"].ended_at
    )


def test_the_count_starts_anew_once_it_has_run(engine: Simulation) -> None:
    engine.cancel("long")
    engine.arrive("big", blocks=20, output=100, tenant="other")
    engine.step()
    engine.arrive("second", blocks=20, output=4)
    for number in range(MAX_BACKFILL):
        engine.arrive(f"small{number}", blocks=1, output=4)
    plan = engine.step()
    assert len(plan.admitted) == MAX_BACKFILL


def test_nobody_of_a_lower_tier_borrows_past_a_blocked_request(engine: Simulation) -> None:
    engine.arrive("big", blocks=20, output=4)
    engine.arrive("low", blocks=1, tenant="low")
    engine.arrive("own", blocks=1, tenant="owner")
    plan = engine.step()
    assert plan.admitted == ("own",)  # what is a tenant's own is not borrowed
    reasons = {decision.request_id: decision.reason for decision in plan.decisions}
    assert reasons["low"] is Reason.BEHIND_HEAD


def test_a_head_above_its_tenants_cap_is_passed_by_the_tenants_smaller_ones(
    engine: Simulation,
) -> None:
    engine.arrive("big", blocks=20, tenant="other", output=4)
    engine.arrive("small", tenant="other", output=4)
    assert engine.step().admitted == ("small",)
