"""Inside a tenant: the earliest deadline first among those that can still be met."""

import pytest

from tidegate_policies.rules import ServiceRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation


def an_engine(policy: PolicySnapshot | None = None) -> Simulation:
    """Build an engine that serves one request at a time and is busy for 100 ms."""
    engine = a_simulation(policy or a_snapshot(), blocks=100, max_num_seqs=1)
    engine.accept(a_request(prompt=a_prompt(999, 4), output=8, request_id="busy"))
    engine.step()
    return engine


def arrive(
    engine: Simulation,
    name: str,
    ttft_seconds: float | None,
    *,
    tenant: str = "acme",
    arrived_at: float | None = None,
) -> None:
    number = len(engine.log.requests)
    engine.accept(
        a_request(
            tenant,
            prompt=a_prompt(number, 20),
            output=2,
            request_id=name,
            ttft_seconds=ttft_seconds,
            arrived_at=arrived_at,
        )
    )


def order(engine: Simulation) -> list[str]:
    engine.drain()
    return [name for plan in engine.plans for name in plan.admitted if name != "busy"]


def test_the_earliest_deadline_goes_first() -> None:
    engine = an_engine()
    for name, ttft_seconds in (("late", 9.0), ("soon", 3.0), ("middle", 6.0)):
        arrive(engine, name, ttft_seconds)
    assert order(engine) == ["soon", "middle", "late"]


def test_a_deadline_counts_from_when_a_request_came() -> None:
    engine = an_engine()
    engine.clock.advance(3.0)
    arrive(engine, "comes now", 3.0)
    arrive(engine, "came before", 5.0, arrived_at=0.5)
    assert order(engine) == ["came before", "comes now"]


def test_who_was_promised_nothing_comes_after_the_deadlines_and_by_arrival() -> None:
    engine = an_engine()
    arrive(engine, "first", None)
    arrive(engine, "second", None)
    arrive(engine, "promised", 5.0)
    assert order(engine) == ["promised", "first", "second"]


def test_a_deadline_that_is_lost_already_falls_back_to_its_arrival() -> None:
    engine = an_engine()
    arrive(engine, "first", None)
    arrive(engine, "lost", 0.02)  # the busy one takes longer
    arrive(engine, "feasible", 5.0)
    arrive(engine, "last", None)
    assert order(engine) == ["feasible", "first", "lost", "last"]


def test_a_deadline_counts_from_arrival() -> None:
    engine = an_engine()
    arrive(engine, "early", 3.0)
    engine.step()
    arrive(engine, "later", 3.0)
    assert order(engine) == ["early", "later"]


def test_the_tenants_target_is_the_deadline_of_requests_without_their_own() -> None:
    promised = ServiceRule(ttft_seconds=5.0)
    engine = an_engine(a_snapshot(a_tenant(service=promised)))
    arrive(engine, "tenants", None)
    arrive(engine, "own", 2.0)
    assert order(engine) == ["own", "tenants"]


def test_a_deadline_is_no_priority_over_other_tenants() -> None:
    engine = an_engine(a_snapshot(a_tenant("acme"), a_tenant("other"), a_tenant("third")))
    arrive(engine, "others", None, tenant="other")
    arrive(engine, "thirds", 1.0, tenant="third")
    for name in ("x", "y"):
        arrive(engine, name, 1.0)
    assert order(engine)[:2] == ["others", "thirds"]


def test_a_meetable_deadline_is_met_though_many_came_before() -> None:
    engine = an_engine()
    for number in range(30):
        arrive(engine, f"queued{number}", None)
    arrive(engine, "promised", 0.25)
    engine.drain()
    trace = engine.log.requests["promised"]
    assert trace.ttft_seconds is not None
    assert trace.ttft_seconds <= 0.25
    last = engine.log.requests["queued29"]
    assert last.ttft_seconds == pytest.approx(
        max(t.ttft_seconds or 0.0 for t in engine.log.requests.values())
    )
