"""Whose KV blocks are whose, and who is protected, changes with the next step."""

import pytest

from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.request import PreemptionKey
from tidegate_policies.rules import KvEstimate, PreemptionMode, PreemptionRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_tenant
from tidegate_testing.simulation import (
    Simulation,
    a_simulation,
    admitting_by_present_need,
)

BLOCKS = 40
EAGER = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)


def an_engine(policy: PolicySnapshot, *, max_num_seqs: int = 64) -> Simulation:
    return a_simulation(policy, blocks=BLOCKS, host_blocks=BLOCKS, max_num_seqs=max_num_seqs)


def running(engine: Simulation, tenant: str = "acme") -> int:
    return engine.scheduler.stats().tenants[tenant].running


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}{number}" for number in range(count))


def test_a_raised_nominal_is_reclaimed_with_the_next_step() -> None:
    def policy(percent: int) -> PolicySnapshot:
        return admitting_by_present_need(
            a_tenant("owner", kv_nominal_percent=percent), a_tenant("guest", preemption=EAGER)
        )

    engine = an_engine(policy(0))
    engine.arrive(*numbered("guest", 4), tenant="guest", blocks=9)
    engine.steps(3)
    engine.arrive("own", tenant="owner", blocks=18, output=8)
    engine.steps(3)
    assert not engine.output("own")
    engine.obey(policy(50))
    assert "own" in engine.step().admitted
    assert {decision.reason for decision in engine.preempted()} == {Reason.RECLAIMED}


def test_what_a_lowered_nominal_leaves_above_it_is_borrowed_and_may_be_reclaimed() -> None:
    def policy(first: int, second: int) -> PolicySnapshot:
        return admitting_by_present_need(
            a_tenant("first", kv_nominal_percent=first, preemption=EAGER),
            a_tenant("second", kv_nominal_percent=second),
        )

    engine = an_engine(policy(80, 0))
    engine.arrive(*numbered("f", 3), tenant="first", blocks=10)
    engine.steps(3)
    assert engine.scheduler.stats().tenants["first"].kv_borrowed_blocks == 0
    engine.obey(policy(25, 50))
    engine.arrive("s", tenant="second", blocks=19, output=8)
    plan = engine.step()
    assert "s" in plan.admitted
    assert plan.preempted == ("f2",)  # the newest: with it gone, 20 of 40 blocks are free
    assert {decision.reason for decision in engine.preempted()} == {Reason.RECLAIMED}


def test_a_lowered_borrowing_limit_drains_down_and_is_kept_from_then_on() -> None:
    def policy(percent: int | None) -> PolicySnapshot:
        return admitting_by_present_need(
            a_tenant(kv_borrowing_limit_percent=percent, preemption=EAGER)
        )

    engine = an_engine(policy(None))
    engine.arrive(*numbered("r", 12), blocks=3, output=24)
    engine.step()
    assert engine.used_blocks("acme") > 30
    engine.obey(policy(25))
    used = [engine.used_blocks("acme")]
    while engine.scheduler.has_work:
        engine.step()
        used.append(engine.used_blocks("acme"))
        assert used[-1] <= max(10, used[-2]), "it grew above its limit"
    assert max(used[len(used) // 2 :]) <= 10
    assert all(trace.is_finished for trace in engine.log.requests.values())


def test_a_lowered_lendable_part_admits_no_borrower_into_it() -> None:
    def policy(percent: int) -> PolicySnapshot:
        owner = a_tenant("owner", kv_nominal_percent=50, kv_lendable_percent=percent)
        return admitting_by_present_need(owner, a_tenant("guest"), a_tenant("other"))

    engine = an_engine(policy(100))
    engine.arrive("g1", tenant="guest", blocks=15, output=60)
    engine.arrive("o1", tenant="other", blocks=12, output=60)
    engine.step()
    assert engine.used_blocks("guest") + engine.used_blocks("other") == 27
    engine.obey(policy(0))
    engine.arrive("g2", tenant="guest", blocks=4, output=8)
    engine.step()
    assert not engine.log.requests["g2"].admitted_at
    engine.obey(policy(100))
    assert engine.step().admitted == ("g2",)


def test_lowered_watermarks_take_borrowers_out_with_the_next_step() -> None:
    tenants = (a_tenant("a", preemption=EAGER), a_tenant("b", preemption=EAGER))
    engine = an_engine(admitting_by_present_need(*tenants))
    for tenant in ("a", "b"):
        engine.arrive(*numbered(tenant, 4), tenant=tenant, blocks=4)
    engine.steps(2)
    assert engine.scheduler.stats().kv_used_blocks == 32
    engine.obey(
        admitting_by_present_need(
            *tenants, watermarks=WatermarkRule(low_percent=40, high_percent=60)
        )
    )
    plan = engine.step()
    assert len(plan.preempted) == 4
    assert engine.scheduler.stats().kv_used_blocks == 16
    assert {decision.reason for decision in engine.preempted()} == {Reason.PRESSURE}


def test_a_changed_estimate_decides_the_next_admission() -> None:
    tenants = (a_tenant("a"), a_tenant("b"))
    engine = an_engine(admitting_by_present_need(*tenants, kv_estimate=KvEstimate.WORST_CASE))
    engine.arrive("long", tenant="a", blocks=2, output=400)
    engine.step()
    engine.arrive("next", tenant="b", blocks=2, output=400)
    engine.steps(3)
    assert not engine.output("next")
    engine.obey(admitting_by_present_need(*tenants, kv_estimate=KvEstimate.OPTIMISTIC))
    assert engine.step().admitted == ("next",)


def a_victims_policy(**rule: object) -> PolicySnapshot:
    fields: dict[str, object] = {
        "mode": PreemptionMode.RECOMPUTE,
        "min_quantum_tokens": 0,
        **rule,
    }
    preemption = PreemptionRule(**fields)  # type: ignore[arg-type]
    return admitting_by_present_need(
        a_tenant(kv_nominal_percent=60, preemption=preemption), a_tenant("gold", tier="high")
    )


@pytest.mark.parametrize(
    "protecting",
    [{"preemptible": False}, {"min_quantum_tokens": 100}, {"max_preemptions": 1}],
    ids=["not preemptible", "in its quantum", "at its cap"],
)
def test_changed_protections_are_for_what_runs_already(protecting: dict[str, object]) -> None:
    engine = an_engine(a_victims_policy(), max_num_seqs=1)
    engine.arrive("victim")
    engine.steps(3)
    engine.arrive("g1", tenant="gold", output=4)
    assert engine.step().preempted == ("victim",)
    while "victim" not in engine.step().admitted:
        pass
    engine.steps(3)
    engine.obey(a_victims_policy(**protecting))
    engine.step()
    engine.arrive("g2", tenant="gold", output=4)
    engine.steps(5)
    assert len(engine.preempted()) == 1
    engine.obey(a_victims_policy())
    assert engine.step().preempted == ("victim",)
    engine.drain()


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
def test_a_changed_mode_is_that_of_the_next_preemption(mode: PreemptionMode) -> None:
    (other,) = {PreemptionMode.SWAP, PreemptionMode.RECOMPUTE} - {mode}
    engine = an_engine(a_victims_policy(mode=other), max_num_seqs=1)
    engine.arrive("victim")
    engine.steps(3)
    engine.obey(a_victims_policy(mode=mode))
    engine.arrive("g", tenant="gold", output=4)
    assert engine.step().preempted == ("victim",)
    key = PreemptionKey("displaced", mode.lower())
    assert engine.scheduler.stats().tenants["acme"].preemptions == {key: 1}


def test_a_tenant_that_may_reclaim_no_more_waits_for_its_blocks() -> None:
    def policy(*, reclaims: bool) -> PolicySnapshot:
        owner = a_tenant(
            "owner", kv_nominal_percent=50, preemption=PreemptionRule(reclaims=reclaims)
        )
        return admitting_by_present_need(owner, a_tenant("guest", preemption=EAGER))

    engine = an_engine(policy(reclaims=True))
    engine.arrive(*numbered("guest", 4), tenant="guest", blocks=9)
    engine.steps(3)
    engine.obey(policy(reclaims=False))
    engine.arrive("own", tenant="owner", blocks=18, output=8)
    engine.steps(3)
    assert not engine.preempted()
    engine.obey(policy(reclaims=True))
    assert "own" in engine.step().admitted
