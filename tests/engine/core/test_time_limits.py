"""Requests that wait, or run, longer than their tenant's policy allows are dropped."""

import pytest

from tidegate_engine.core.decisions import Reason, Verdict
from tidegate_engine.core.plan import Expiry, ExpiryCause
from tidegate_engine.replay.log import Outcome
from tidegate_policies.rules import (
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    StopPolicy,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation


def a_policy(*, queue: float | None = None, request: float | None = None) -> PolicySnapshot:
    limited = ServiceRule(queue_timeout_seconds=queue, request_timeout_seconds=request)
    rule = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    return a_snapshot(
        a_tenant("limited", service=limited, preemption=rule),
        a_tenant("other", tier="high"),
        a_tenant("held", stop=StopPolicy.HOLD, service=ServiceRule(queue_timeout_seconds=0.4)),
        tiers={"high": 10, "standard": 0},
        kv_estimate=KvEstimate.OPTIMISTIC,
    )


def arrive(
    engine: Simulation, name: str, *, tenant: str = "limited", output: int = 400, **fields: object
) -> None:
    prompt = a_prompt(len(engine.log.requests), 20)
    engine.accept(a_request(tenant, prompt=prompt, output=output, request_id=name, **fields))


def test_who_waits_too_long_is_dropped_when_its_time_is_up() -> None:
    engine = a_simulation(a_policy(queue=1.0), blocks=100, max_num_seqs=1)
    arrive(engine, "runs", tenant="other")
    engine.steps(2)
    arrived_at = engine.clock.now()
    arrive(engine, "waits")
    while not (plan := engine.step()).expired:
        assert engine.clock.now() < arrived_at + 1.1
    assert plan.expired == (Expiry("waits", ExpiryCause.QUEUE_TIMEOUT),)
    assert engine.log.requests["waits"].outcome is Outcome.QUEUE_TIMEOUT
    assert (engine.log.requests["waits"].ended_at or 0.0) >= arrived_at + 1.0
    assert plan.decisions[0][2:4] == (Verdict.EXPIRED, Reason.QUEUE_TIMEOUT)
    assert engine.scheduler.stats().tenants["limited"].expired == 1
    assert engine.scheduler.stats().tenants["limited"].waiting == 0
    assert not engine.cancel("waits")


def test_who_has_been_admitted_in_time_is_not_dropped_for_waiting() -> None:
    engine = a_simulation(a_policy(queue=1.0), blocks=100)
    arrive(engine, "runs", output=200)
    engine.drain()
    assert engine.clock.now() > 2.0
    assert engine.log.requests["runs"].outcome is Outcome.LENGTH


def test_who_was_preempted_does_not_wait_for_its_first_token() -> None:
    engine = a_simulation(a_policy(queue=0.5), blocks=100, max_num_seqs=1)
    arrive(engine, "dropped before", tenant="held")
    arrive(engine, "victim", output=50)
    engine.steps(5)
    arrive(engine, "gold", tenant="other", output=100)
    engine.drain()
    assert engine.log.requests["dropped before"].outcome is Outcome.QUEUE_TIMEOUT
    assert engine.log.requests["victim"].preemptions == 1
    assert engine.log.requests["victim"].outcome is Outcome.LENGTH


@pytest.mark.parametrize("state", ["queued", "running", "swapped", "copying"])
def test_who_takes_too_long_is_dropped_wherever_it_is_and_frees_what_it_held(state: str) -> None:
    engine = a_simulation(a_policy(request=1.0), blocks=100, host_blocks=100, max_num_seqs=1)
    if state == "queued":
        arrive(engine, "blocker", tenant="other")
        engine.step()
    arrived_at = engine.clock.now()
    arrive(engine, "late")
    if state in {"swapped", "copying"}:
        engine.steps(20)
        if state == "copying":
            engine.run_until(0.98)
        arrive(engine, "blocker", tenant="other")
        engine.step()
    while not (plan := engine.step()).expired:
        assert engine.clock.now() < arrived_at + 1.1
    assert plan.expired == (Expiry("late", ExpiryCause.REQUEST_TIMEOUT),)
    assert engine.log.requests["late"].outcome is Outcome.REQUEST_TIMEOUT
    assert all(row.request_id != "late" for row in plan.rows)
    assert bool(engine.log.requests["late"].preemptions) == (state in {"swapped", "copying"})
    engine.steps(3)
    stats = engine.scheduler.stats()
    assert stats.tenants["limited"].kv_used_blocks == 0
    assert stats.host_used_blocks == 0


@pytest.mark.parametrize("limit", ["queue", "request"])
def test_a_limit_counts_from_when_a_request_came_and_not_from_when_it_is_submitted(
    limit: str,
) -> None:
    engine = a_simulation(a_policy(**{limit: 1.0}), blocks=100, max_num_seqs=1)
    arrive(engine, "blocker", tenant="other")
    engine.run_until(2.0)
    arrive(engine, "came before", arrived_at=1.2)
    arrive(engine, "comes now")
    while not engine.step().expired:
        assert engine.clock.now() < 2.3
    assert engine.clock.now() >= 2.2
    arrive(engine, "too late already", arrived_at=1.0)
    assert [expiry.request_id for expiry in engine.step().expired] == ["too late already"]


def test_once_a_choice_is_admitted_the_others_do_not_wait_too_long_any_more() -> None:
    engine = a_simulation(a_policy(queue=1.0), blocks=100, max_num_seqs=1)
    arrive(engine, "first", output=150, generation_id="g")
    arrive(engine, "second", output=150, generation_id="g")
    engine.step()
    arrive(engine, "third", output=5, generation_id="g")
    arrive(engine, "another's", generation_id="h")
    arrive(engine, "alone")
    engine.drain()
    requests = engine.log.requests
    assert requests["another's"].outcome is requests["alone"].outcome is Outcome.QUEUE_TIMEOUT
    # The last waits when the first has ended already.
    assert (requests["first"].ended_at or 0.0) > 1.5
    assert (requests["third"].admitted_at or 0.0) > 3.0
    assert {requests[name].outcome for name in ("first", "second", "third")} == {Outcome.LENGTH}


def test_a_choice_that_has_ended_was_admitted_all_the_same() -> None:
    engine = a_simulation(a_policy(), blocks=100, max_num_seqs=1)
    arrive(engine, "first", output=5, generation_id="g")
    arrive(engine, "second", generation_id="g")
    engine.steps(4)
    arrive(engine, "gold", tenant="other", output=150)
    engine.cancel("first")
    engine.obey(a_policy(queue=1.0))
    engine.drain()
    assert (engine.log.requests["second"].admitted_at or 0.0) > 1.5
    assert engine.log.requests["second"].outcome is Outcome.LENGTH


def test_of_choices_that_all_wait_too_long_all_are_dropped() -> None:
    engine = a_simulation(a_policy(queue=1.0), blocks=100, max_num_seqs=1)
    arrive(engine, "blocker", tenant="other")
    for name in ("first", "second", "cancelled"):
        arrive(engine, name, generation_id="g")
    engine.cancel("cancelled")
    engine.drain()
    requests = engine.log.requests
    assert requests["first"].outcome is requests["second"].outcome is Outcome.QUEUE_TIMEOUT


def test_all_choices_together_may_take_no_longer_than_one() -> None:
    engine = a_simulation(a_policy(request=1.0), blocks=100, max_num_seqs=1)
    arrive(engine, "first", output=20, generation_id="g")
    arrive(engine, "second", output=400, generation_id="g")
    engine.drain()
    requests = engine.log.requests
    assert requests["first"].outcome is Outcome.LENGTH
    assert requests["second"].outcome is Outcome.REQUEST_TIMEOUT
    assert requests["second"].ended_at == pytest.approx(1.0, abs=0.03)


def test_nobody_comes_from_the_future() -> None:
    engine = a_simulation(a_policy(request=1.0), blocks=100)
    with pytest.raises(ValueError, match="'early' came at 2, it is 0"):
        arrive(engine, "early", arrived_at=2.0)
    assert not engine.scheduler.has_work
    assert engine.scheduler.stats().arrivals == 0


def test_the_plan_names_the_next_limit_when_only_time_can_change_it() -> None:
    held = a_snapshot(
        a_tenant("limited", max_running=1, service=ServiceRule(queue_timeout_seconds=2.0))
    )
    engine = a_simulation(held, blocks=100)
    arrive(engine, "runs")
    arrive(engine, "waits")
    assert engine.step().wake_at == 2.0
    engine.cancel("waits")
    assert engine.step().wake_at is None


def test_of_two_limits_at_once_a_request_is_dropped_for_one() -> None:
    engine = a_simulation(a_policy(queue=1.0, request=1.0), blocks=100, max_num_seqs=1)
    arrive(engine, "runs", tenant="other")
    engine.step()
    arrive(engine, "waits")
    engine.clock.advance(1.5)
    assert [expiry.request_id for expiry in engine.step().expired] == ["waits"]
    assert engine.scheduler.stats().tenants["limited"].expired == 1


def ended_at(limit: str, before: float | None, after: float | None) -> float | None:
    """Return when who waits or runs, as `limit` says, is dropped: 0.5 s after it came that changes.

    None = it gets its whole output.
    """
    engine = a_simulation(a_policy(**{limit: before}), blocks=100, max_num_seqs=1)
    arrive(engine, "request", tenant="limited" if limit == "request" else "other", output=150)
    arrive(engine, "queue", output=5)
    engine.run_until(0.5)
    engine.obey(a_policy(**{limit: after}))
    engine.drain()
    trace = engine.log.requests[limit]
    return None if trace.outcome is Outcome.LENGTH else trace.ended_at


@pytest.mark.parametrize("limit", ["queue", "request"])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param(None, 0.8, 0.8, id="set"),
        pytest.param(None, 0.3, 0.5, id="set to what is over"),
        pytest.param(0.8, None, None, id="removed"),
        pytest.param(0.8, 1.2, 1.2, id="longer"),
        pytest.param(1.2, 0.8, 0.8, id="shorter"),
        pytest.param(0.8, 0.8, 0.8, id="the same"),
    ],
)
def test_a_changed_limit_holds_for_who_is_there_from_its_arrival(
    limit: str, before: float | None, after: float | None, expected: float | None
) -> None:
    assert ended_at(limit, before, after) == (
        None if expected is None else pytest.approx(expected, abs=0.03)
    )


def test_who_is_in_no_policy_any_more_keeps_the_limits_that_it_had() -> None:
    engine = a_simulation(a_policy(request=1.0), blocks=100)
    arrive(engine, "deserted")
    engine.step()
    engine.obey(a_snapshot(a_tenant("other")))
    engine.drain()
    assert engine.log.requests["deserted"].outcome is Outcome.REQUEST_TIMEOUT


def test_after_a_change_the_plan_names_the_limit_that_holds_now() -> None:
    engine = a_simulation(a_policy(), blocks=100)
    arrive(engine, "held", tenant="held")
    assert engine.step().wake_at == 0.4
    engine.obey(a_snapshot(a_tenant("held", stop=StopPolicy.HOLD)))
    assert engine.step().wake_at is None
    engine.obey(
        a_snapshot(
            a_tenant("held", stop=StopPolicy.HOLD, service=ServiceRule(request_timeout_seconds=9.0))
        )
    )
    assert engine.step().wake_at == 9.0
