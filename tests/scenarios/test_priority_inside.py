"""Inside a tier nobody is displaced, and a full pool is no deadlock."""

import random
from collections import Counter

import pytest

from tidegate_engine.core.decisions import Reason, Verdict
from tidegate_engine.core.request import PreemptionKey
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_prompt, a_simulation

BLOCKS = 60
WIDE = WatermarkRule(low_percent=98, high_percent=99)  # watermarks out of the way
EAGER = PreemptionRule(min_quantum_tokens=0)


def counted_causes(engine: Simulation) -> Counter[str]:
    """Return the preemptions by cause, as the scheduler counts them."""
    causes: Counter[str] = Counter()
    for tenant in engine.scheduler.stats().tenants.values():
        assert tenant.preempted == sum(tenant.preemptions.values())
        for key, count in tenant.preemptions.items():
            assert isinstance(key, PreemptionKey)
            causes[key.cause] += count
    return causes


def let_come(engine: Simulation, shares: dict[str, int], *, steps: int) -> None:
    """Let requests of these tenants come, a little more than can be served."""
    draw = random.Random(15)
    for step in range(steps):
        if engine.scheduler.num_waiting < 6 and draw.random() < 0.25:
            (tenant,) = draw.choices([*shares], [*shares.values()])
            prompt = a_prompt(step, draw.randint(8, 120))
            engine.accept(a_request(tenant, prompt=prompt, output=draw.randint(8, 100)))
        engine.step()


def test_an_arrival_never_displaces_its_own_tier_in_ten_thousand_steps() -> None:
    engine = a_simulation(
        a_snapshot(
            a_tenant("a", preemption=EAGER),
            a_tenant("b", preemption=EAGER),
            a_tenant("owner", kv_nominal_percent=40, preemption=EAGER),
            kv_estimate=KvEstimate.OPTIMISTIC,
            watermarks=WIDE,
        ),
        blocks=BLOCKS,
        max_num_seqs=10,
        check_every=100,
    )
    let_come(engine, {"a": 5, "b": 5, "owner": 1}, steps=10_000)
    decided = Counter(decision.reason for decision in engine.preempted())
    assert counted_causes(engine) == decided
    assert decided[Reason.DISPLACED] == 0
    assert decided[Reason.PRESSURE] > 100
    assert decided[Reason.RECLAIMED] > 10
    held = {d.reason for d in engine.decisions if d.verdict is Verdict.HELD}
    assert held >= {Reason.NO_SLOT, Reason.WATERMARK}, "nobody was tempted"


def test_displacement_reclaim_and_pressure_are_counted_apart() -> None:
    tiers = {"owner": "low", "a": "low", "b": "high", "c": "high"}
    engine = a_simulation(
        a_snapshot(
            *(
                a_tenant(
                    name,
                    tier=tier,
                    kv_nominal_percent=40 if name == "owner" else 0,
                    preemption=EAGER,
                )
                for name, tier in tiers.items()
            ),
            tiers={"high": 10, "low": 0},
            kv_estimate=KvEstimate.OPTIMISTIC,
            watermarks=WIDE,
        ),
        blocks=BLOCKS,
        max_num_seqs=10,
        check_every=100,
    )
    let_come(engine, {"a": 4, "b": 2, "c": 2, "owner": 2}, steps=3000)
    decided = Counter(decision.reason for decision in engine.preempted())
    assert counted_causes(engine) == decided
    assert min(decided[r] for r in (Reason.DISPLACED, Reason.RECLAIMED, Reason.PRESSURE)) > 5
    tenants = {trace.request_id: trace.tenant for trace in engine.log.requests.values()}
    for decision in engine.preempted():
        victim = tiers[decision.tenant]
        if decision.reason is Reason.DISPLACED:
            assert (victim, tiers[tenants[decision.beneficiary]]) == ("low", "high")
        if decision.reason is Reason.RECLAIMED:
            assert tenants[decision.beneficiary] == "owner"


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
@pytest.mark.parametrize("max_preemptions", [1, 1000])
@pytest.mark.parametrize("estimate", list(KvEstimate))
def test_a_single_tenant_with_a_full_pool_never_deadlocks(
    estimate: KvEstimate, max_preemptions: int, mode: PreemptionMode
) -> None:
    rule = PreemptionRule(mode=mode, max_preemptions=max_preemptions)
    engine = a_simulation(
        a_snapshot(a_tenant(preemption=rule), kv_estimate=estimate, watermarks=WIDE),
        blocks=20,
        host_blocks=40,
        check_every=20,
    )
    for number in range(16):
        prompt = a_prompt(number, 20)
        engine.accept(a_request(prompt=prompt, output=16 * BLOCK_SIZE, request_id=f"r{number}"))
    before = 0
    while engine.scheduler.has_work:
        engine.steps(50)
        done = engine.log.output_tokens
        assert done > before or not engine.scheduler.has_work, "nobody got on in 50 steps"
        before = done
    assert all(trace.is_finished for trace in engine.log.requests.values())
    assert all(len(trace.token_ids) == 16 * BLOCK_SIZE for trace in engine.log.requests.values())
    if estimate is KvEstimate.OPTIMISTIC:
        assert engine.preempted(), "the pool was never full"


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_full_pool_is_no_deadlock_when_every_request_is_at_its_preemption_cap(
    mode: PreemptionMode,
) -> None:
    def capped(max_preemptions: int) -> PolicySnapshot:
        rule = PreemptionRule(mode=mode, max_preemptions=max_preemptions, min_quantum_tokens=0)
        return a_snapshot(
            a_tenant(preemption=rule), kv_estimate=KvEstimate.OPTIMISTIC, watermarks=WIDE
        )

    engine = a_simulation(capped(1000), blocks=20, host_blocks=40)
    traces = engine.log.requests
    for number in range(6):
        prompt = a_prompt(number, 20)
        engine.accept(a_request(prompt=prompt, output=16 * BLOCK_SIZE, request_id=f"r{number}"))
    running: list[str] = []
    while len(running) < 2 or not all(traces[name].preemptions for name in running):
        plan = engine.step()
        running = [row.request_id for row in plan.rows]
    before = len(engine.preempted())
    engine.obey(capped(1))
    engine.drain(at_most_steps=3000)
    at_cap = [d for d in engine.preempted()[before:] if d.request_id in running]
    assert at_cap, "the pool was never full"
    assert {decision.reason for decision in at_cap} == {Reason.PRESSURE}
    assert all(len(trace.token_ids) == 16 * BLOCK_SIZE for trace in traces.values())
