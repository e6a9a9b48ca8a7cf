"""A tenant is held, drained or cancelled from the next step on."""

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.request import RejectionCode
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import PreemptionMode, PreemptionRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import (
    Simulation,
    a_prompt,
    a_simulation,
    admitting_by_present_need,
    output_alone,
)

BLOCKS = 40
EAGER = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)


def an_engine(policy: PolicySnapshot, *, max_num_seqs: int = 64) -> Simulation:
    return a_simulation(policy, blocks=BLOCKS, host_blocks=BLOCKS, max_num_seqs=max_num_seqs)


def running(engine: Simulation, tenant: str = "acme") -> int:
    return engine.scheduler.stats().tenants[tenant].running


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(count))


def a_stopped(stop: StopPolicy) -> PolicySnapshot:
    return admitting_by_present_need(a_tenant(stop=stop), a_tenant("other"))


@pytest.fixture
def busy() -> Simulation:
    """Two requests of a tenant run, two wait, and another tenant has as many."""
    engine = an_engine(a_stopped(StopPolicy.NONE), max_num_seqs=4)
    for tenant in ("acme", "other"):
        engine.arrive(*numbered(f"{tenant}-", 4), tenant=tenant, output=20)
    engine.steps(2)
    assert (running(engine, "acme"), running(engine, "other")) == (2, 2)
    return engine


def test_hold_queues_and_admits_nobody_until_it_is_lifted(busy: Simulation) -> None:
    busy.obey(a_stopped(StopPolicy.HOLD))
    busy.arrive("new")
    while busy.log.requests["other-3"].ended_at is None:
        busy.step()
    outcomes = {name: trace.ended_at for name, trace in busy.log.requests.items()}
    assert [name for name, ended_at in outcomes.items() if ended_at is None] == [
        "acme-2",
        "acme-3",
        "new",
    ]
    assert not busy.step().rows
    busy.obey(a_stopped(StopPolicy.NONE))
    assert set(busy.step().admitted) == {"acme-2", "acme-3", "new"}


def test_hold_keeps_what_is_preempted_and_its_outputs_are_whole() -> None:
    def policy(stop: StopPolicy) -> PolicySnapshot:
        rule = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
        return admitting_by_present_need(
            a_tenant(stop=stop, preemption=rule), a_tenant("gold", tier="high")
        )

    engine = an_engine(policy(StopPolicy.NONE), max_num_seqs=1)
    victim = a_request(prompt=a_prompt(7, 20), output=40, request_id="victim")
    engine.accept(victim)
    engine.steps(5)
    engine.arrive("g", tenant="gold", output=4)
    engine.step()
    engine.obey(policy(StopPolicy.HOLD))
    engine.steps(20)
    assert engine.log.requests["g"].is_finished
    engine.obey(policy(StopPolicy.NONE))
    engine.drain()
    alone = output_alone(victim, blocks=BLOCKS, policy=policy(StopPolicy.NONE))
    assert engine.output("victim") == alone


def test_drain_refuses_new_requests_and_lets_the_others_finish(busy: Simulation) -> None:
    busy.obey(a_stopped(StopPolicy.DRAIN))
    busy.step()
    rejection = busy.submit(a_request(prompt=4, output=4, request_id="new"))
    assert rejection is not None
    assert rejection.code is RejectionCode.TENANT_STOPPED
    busy.drain()
    traces = [trace for name, trace in busy.log.requests.items() if name != "new"]
    assert all(len(trace.token_ids) == 20 for trace in traces)


def test_cancel_refuses_new_requests_and_drops_the_others_with_the_next_step(
    busy: Simulation,
) -> None:
    busy.obey(a_stopped(StopPolicy.CANCEL))
    plan = busy.step()
    assert plan.stopped == numbered("acme-", 4)
    assert {row.request_id for row in plan.rows} >= set(numbered("other-", 2))
    assert not any(row.request_id.startswith("acme") for row in plan.rows)
    assert busy.used_blocks("acme") == 0
    assert busy.scheduler.stats().tenants["acme"].cancelled == 4
    rejection = busy.submit(a_request(prompt=4, output=4))
    assert rejection is not None
    assert rejection.code is RejectionCode.TENANT_STOPPED
    busy.obey(a_stopped(StopPolicy.NONE))
    busy.step()
    assert busy.submit(a_request(prompt=4, output=4)) is None


# -- how long a stop takes ------------------------------------------------------------------------


def stop_seconds(engine: Simulation, tenant: str = "acme") -> float | None:
    return engine.scheduler.stats().tenants[tenant].stop_seconds


def test_a_cancel_takes_from_its_arrival_to_the_step_that_drops_all(busy: Simulation) -> None:
    came_at = busy.clock.now()
    busy.step()
    busy.scheduler.apply_policy(a_stopped(StopPolicy.CANCEL), 9, at=came_at)
    dropped_at = busy.clock.now()
    busy.step()
    assert dropped_at > came_at
    assert stop_seconds(busy) == dropped_at - came_at
    assert stop_seconds(busy, "other") is None
    busy.obey(a_stopped(StopPolicy.CANCEL))
    busy.step()
    assert stop_seconds(busy) == dropped_at - came_at
    busy.obey(a_stopped(StopPolicy.NONE))
    busy.step()
    assert stop_seconds(busy) is None


def test_a_drain_takes_until_the_last_of_its_requests_has_ended(busy: Simulation) -> None:
    came_at = busy.clock.now()
    busy.obey(a_stopped(StopPolicy.DRAIN))
    for _ in range(200):
        if busy.scheduler.stats().tenants["acme"].finished == 4:
            break
        assert stop_seconds(busy) is None
        busy.step()
    ended_at = busy.clock.now()
    busy.step()
    assert stop_seconds(busy) == ended_at - came_at


def test_a_cancel_that_follows_a_drain_is_measured_by_itself(busy: Simulation) -> None:
    busy.obey(a_stopped(StopPolicy.DRAIN))
    busy.steps(2)
    busy.obey(a_stopped(StopPolicy.CANCEL))
    busy.step()
    assert stop_seconds(busy) == 0


def test_what_a_copy_still_reads_counts_to_a_cancel() -> None:
    def policy(stop: StopPolicy) -> PolicySnapshot:
        rule = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
        return admitting_by_present_need(
            a_tenant(stop=stop, preemption=rule), a_tenant("gold", tier="high")
        )

    slow = AffineCost(ExecutorCosts(swap_block_seconds=0.2))
    engine = a_simulation(
        policy(StopPolicy.NONE), blocks=BLOCKS, host_blocks=BLOCKS, max_num_seqs=1, cost=slow
    )
    engine.arrive("victim", output=40)
    engine.steps(3)
    engine.arrive("g", tenant="gold", output=100)
    engine.steps(2)
    assert engine.executor.copying
    engine.obey(policy(StopPolicy.CANCEL))
    engine.step()
    assert stop_seconds(engine) is None
    engine.drain()
    engine.step()
    assert 0.1 < (stop_seconds(engine) or 0) < 0.5
