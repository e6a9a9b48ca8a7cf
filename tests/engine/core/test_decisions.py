"""Why: each admission, hold, preemption and drop is recorded with its reason."""

import pytest

from tidegate_engine.core.decisions import (
    Decision,
    DecisionLog,
    DecisionRecord,
    Reason,
    Verdict,
)
from tidegate_policies.rules import (
    BatchingRule,
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    StopPolicy,
    TenantRule,
    TierRule,
    WatermarkRule,
)
from tidegate_testing.policies import a_tenant
from tidegate_testing.simulation import Simulation, a_simulation, admitting_by_present_need

BLOCKS = 30
EAGER = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)


def life(engine: Simulation, request_id: str) -> list[tuple[Verdict, Reason]]:
    """Return what was decided about a request, in order."""
    decided = engine.scheduler.decision_log.of(request_id)
    return [(decision.verdict, decision.reason) for _, decision in decided]


def test_an_admission_says_whose_blocks_it_takes() -> None:
    engine = a_simulation(
        admitting_by_present_need(a_tenant("owner", kv_nominal_percent=50), a_tenant("guest")),
        blocks=BLOCKS,
    )
    engine.arrive("own", blocks=3, tenant="owner")
    engine.arrive("borrowed", blocks=3, tenant="guest")
    plan = engine.step()
    assert plan.decisions == (
        Decision("borrowed", "guest", Verdict.ADMITTED, Reason.BORROWING),
        Decision("own", "owner", Verdict.ADMITTED, Reason.WITHIN_NOMINAL),
    )


def test_an_admission_for_a_reserved_share_says_so() -> None:
    tiers = {"high": 10, "low": TierRule(name="low", value=0, reserved_share_percent=50)}
    policy = admitting_by_present_need(
        a_tenant("gold", tier="high"), a_tenant("batch", tier="low"), tiers=tiers
    )
    engine = a_simulation(policy, blocks=BLOCKS, max_num_seqs=2)
    for number in range(3):
        engine.arrive(f"g{number}", blocks=1, tenant="gold", output=8)
    engine.step()
    engine.arrive("b", blocks=1, tenant="batch")
    engine.drain()
    assert (Verdict.ADMITTED, Reason.UNDER_FLOOR) in life(engine, "b")


def held(engine: Simulation, request_id: str) -> set[Reason]:
    return {reason for verdict, reason in life(engine, request_id) if verdict is Verdict.HELD}


HALF = WatermarkRule(low_percent=50, high_percent=90)


def test_who_waits_knows_for_what() -> None:
    policy = admitting_by_present_need(a_tenant(), a_tenant("other"), watermarks=HALF)
    engine = a_simulation(policy, blocks=BLOCKS, max_num_seqs=2)
    engine.arrive("first", blocks=16, tenant="other")
    engine.step()
    engine.arrive("second", blocks=2)
    engine.step()
    assert held(engine, "second") == {Reason.WATERMARK}
    engine.obey(admitting_by_present_need(a_tenant(), a_tenant("other")))
    engine.step()
    engine.arrive("third", blocks=2)
    engine.step()
    assert held(engine, "third") == {Reason.NO_SLOT}


def test_who_waits_for_the_longest_kv_of_all_knows_it() -> None:
    policy = admitting_by_present_need(
        a_tenant(), a_tenant("other"), kv_estimate=KvEstimate.WORST_CASE
    )
    engine = a_simulation(policy, blocks=BLOCKS)
    engine.arrive("first", blocks=2, output=300, tenant="other")
    engine.step()
    engine.arrive("second", blocks=2, output=300)
    engine.step()
    assert held(engine, "second") == {Reason.PREDICTED_PEAK}


def test_who_waits_for_a_prompt_to_be_read_knows_it() -> None:
    policy = admitting_by_present_need(a_tenant(), batching=BatchingRule(max_partial_prefills=1))
    engine = a_simulation(policy, blocks=BLOCKS, max_batched_tokens=32)
    engine.arrive("first", blocks=10)
    engine.step()
    engine.arrive("second", blocks=10)
    engine.step()
    assert held(engine, "second") == {Reason.PARTIAL_PREFILLS}


@pytest.mark.parametrize(
    "tenant", [a_tenant(max_running=1), a_tenant(kv_borrowing_limit_percent=50)]
)
def test_who_is_kept_out_by_its_tenants_own_limit_knows_it(tenant: TenantRule) -> None:
    engine = a_simulation(admitting_by_present_need(tenant), blocks=BLOCKS)
    engine.arrive("first", blocks=10)
    engine.step()
    engine.arrive("second", blocks=10)
    engine.steps(5)
    assert life(engine, "second") == [(Verdict.HELD, Reason.AT_CAP)]


def test_a_hold_is_recorded_once_and_not_in_every_step() -> None:
    engine = a_simulation(admitting_by_present_need(a_tenant(), a_tenant("other")), blocks=BLOCKS)
    engine.arrive("first", blocks=20, tenant="other")
    engine.step()
    engine.arrive("second", blocks=20)
    engine.steps(20)
    assert life(engine, "second") == [(Verdict.HELD, Reason.PREDICTED_PEAK)]
    engine.drain()
    assert life(engine, "second")[1:] == [(Verdict.ADMITTED, Reason.BORROWING)]


def test_a_displaced_request_is_recorded_with_whom_it_yielded_to() -> None:
    engine = a_simulation(
        admitting_by_present_need(a_tenant("gold", tier="high"), a_tenant(preemption=EAGER)),
        blocks=BLOCKS,
        max_num_seqs=1,
    )
    engine.arrive("victim", blocks=2)
    engine.steps(3)
    engine.arrive("g", blocks=2, tenant="gold")
    plan = engine.step()
    assert plan.preempted == ("victim",)
    assert plan.decisions[0] == Decision(
        "victim",
        "acme",
        Verdict.PREEMPTED,
        Reason.DISPLACED,
        beneficiary="g",
        beneficiary_tenant="gold",
        beneficiary_tier="high",
    )
    engine.drain()
    assert [verdict for verdict, _ in life(engine, "victim")] == [
        Verdict.ADMITTED,
        Verdict.PREEMPTED,
        Verdict.HELD,
        Verdict.RESUMED,
    ]


def test_an_owner_that_grows_within_its_nominal_reclaims_and_has_the_blocks() -> None:
    engine = a_simulation(
        admitting_by_present_need(
            a_tenant("owner", kv_nominal_percent=50), a_tenant("guest", preemption=EAGER)
        ),
        blocks=BLOCKS,
    )
    for name in ("own1", "own2"):
        engine.arrive(name, blocks=2, tenant="owner", output=100)
    engine.step()
    engine.arrive("guest", blocks=25, tenant="guest", output=60)
    while not engine.preempted():
        engine.step()
    decision = engine.preempted()[0]
    assert decision.reason is Reason.RECLAIMED
    assert (decision.request_id, decision.beneficiary) == ("guest", "own2")


def test_under_pressure_the_reason_is_pressure_and_an_end_for_lack_of_memory_is_told() -> None:
    engine = a_simulation(admitting_by_present_need(a_tenant(preemption=EAGER)), blocks=BLOCKS)
    engine.arrive("first", blocks=14, output=2000)
    engine.arrive("second", blocks=14, output=2000)
    while not engine.preempted():
        engine.step()
    assert engine.preempted() == [
        Decision("second", "acme", Verdict.PREEMPTED, Reason.PRESSURE, *engine.preempted()[0][4:])
    ]


def test_a_request_that_no_policy_leaves_room_is_ended_for_lack_of_memory() -> None:
    engine = a_simulation(
        admitting_by_present_need(a_tenant("acme"), a_tenant("owner")), blocks=BLOCKS
    )
    engine.arrive("runs", blocks=5)
    engine.arrive("waits", blocks=25)
    engine.step()
    owner = a_tenant("owner", kv_nominal_percent=60, kv_lendable_percent=0)
    engine.obey(admitting_by_present_need(a_tenant("acme"), owner))
    plan = engine.step()
    assert plan.ended == ("waits",)
    assert life(engine, "waits")[-1] == (Verdict.ENDED, Reason.OUT_OF_MEMORY)


def test_drops_are_recorded_with_their_limit_or_their_policy() -> None:
    impatient = a_tenant(
        "impatient", service=ServiceRule(queue_timeout_seconds=0.1, request_timeout_seconds=1.0)
    )
    engine = a_simulation(
        admitting_by_present_need(a_tenant(), impatient), blocks=BLOCKS, max_num_seqs=2
    )
    engine.arrive("first", blocks=1, output=200)
    engine.arrive("slow", blocks=1, output=200, tenant="impatient")
    engine.arrive("waits", blocks=1, tenant="impatient")
    engine.run_until(1.2)
    assert life(engine, "waits")[-1] == (Verdict.EXPIRED, Reason.QUEUE_TIMEOUT)
    assert life(engine, "slow")[-1] == (Verdict.EXPIRED, Reason.REQUEST_TIMEOUT)
    engine.obey(admitting_by_present_need(a_tenant(stop=StopPolicy.CANCEL), impatient))
    engine.step()
    assert life(engine, "first")[-1] == (Verdict.STOPPED, Reason.TENANT_STOPPED)


def test_a_record_names_step_revision_time_and_watermark_and_is_what_the_plan_says() -> None:
    engine = a_simulation(admitting_by_present_need(a_tenant()), blocks=BLOCKS)
    engine.clock.advance(7.0)
    engine.obey(admitting_by_present_need(a_tenant(), a_tenant("other"), watermarks=HALF))
    engine.arrive("first", blocks=16)
    plan = engine.step()
    engine.step()
    engine.arrive("second", blocks=1, tenant="other")
    engine.step()
    first, second = engine.scheduler.decision_log
    assert first == DecisionRecord(1, 2, 7.0, "green", plan.decisions)
    assert (second.step, second.watermark) == (3, "yellow")
    assert second.decisions[0].reason is Reason.WATERMARK


def test_steps_in_which_nothing_is_decided_leave_no_record() -> None:
    engine = a_simulation(admitting_by_present_need(a_tenant()), blocks=BLOCKS)
    engine.arrive("first", blocks=1)
    engine.drain()
    assert len(list(engine.scheduler.decision_log)) == 1


@pytest.mark.parametrize("kept", [1, 3])
def test_the_log_keeps_the_newest_records(kept: int) -> None:
    log = DecisionLog(kept=kept)
    for step in range(5):
        log.add(DecisionRecord(step, 1, 0.0, "green", ()))
    assert [record.step for record in log] == list(range(5 - kept, 5))
