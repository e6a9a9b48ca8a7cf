"""Order, batch and limits change with the next step, and what runs is not harmed."""

import pytest

from tidegate_engine.core.request import RejectionCode
from tidegate_policies.rules import (
    BatchingRule,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    TierRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
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


def batching(**fields: int) -> PolicySnapshot:
    return admitting_by_present_need(a_tenant(), batching=BatchingRule(**fields))


def prefill_tokens(engine: Simulation) -> int:
    rows = engine.step().rows
    return sum(len(row.token_ids) for row in rows if not row.is_decode)


def test_a_changed_weight_is_seen_in_the_shares_of_the_next_thirty_seconds() -> None:
    engine = an_engine(admitting_by_present_need(a_tenant("a"), a_tenant("b")), max_num_seqs=4)

    def served_in(seconds: float) -> dict[str, float]:
        until = engine.clock.now() + seconds
        before = engine.scheduler.stats().tenants
        while engine.clock.now() < until:
            for tenant in ("a", "b"):
                if engine.scheduler.stats().tenants[tenant].waiting < 4:
                    engine.arrive(f"{tenant}{len(engine.log.requests)}", tenant=tenant, output=20)
            engine.step()
        after = engine.scheduler.stats().tenants
        return {t: after[t].service - before[t].service for t in ("a", "b")}

    before = served_in(10)
    assert before["a"] == pytest.approx(before["b"], rel=0.1)
    engine.obey(admitting_by_present_need(a_tenant("a", weight=300), a_tenant("b", weight=100)))
    after = served_in(30)
    assert after["a"] / sum(after.values()) == pytest.approx(0.75, abs=0.02)


def test_a_tenant_that_moves_up_is_served_first_and_one_that_moves_down_last() -> None:
    names = ("a", "b", "c", "d")
    engine = an_engine(admitting_by_present_need(*map(a_tenant, names)), max_num_seqs=1)
    engine.arrive("d1", tenant="d", output=4)
    engine.step()
    for tenant in ("a", "b", "c"):
        engine.arrive(f"{tenant}1", tenant=tenant, output=4)
    moved = admitting_by_present_need(
        a_tenant("a", tier="low"), a_tenant("b"), a_tenant("c", tier="high"), a_tenant("d")
    )
    engine.obey(moved)
    engine.drain()
    assert [name for plan in engine.plans for name in plan.admitted][-3:] == ["c1", "b1", "a1"]


def test_what_runs_follows_its_tenant_into_another_tier() -> None:
    tenants = (a_tenant(preemption=EAGER), a_tenant("equal"))
    engine = an_engine(admitting_by_present_need(*tenants), max_num_seqs=1)
    engine.arrive("runs")
    engine.steps(3)
    engine.arrive("waits", tenant="equal")
    engine.steps(3)
    assert not engine.preempted()
    lowered = a_tenant(tier="low", preemption=EAGER)
    engine.obey(admitting_by_present_need(lowered, a_tenant("equal")))
    plan = engine.step()
    assert (plan.preempted, plan.admitted) == (("runs",), ("waits",))


def test_a_tier_that_gets_the_right_to_preempt_has_it_from_the_next_step_on() -> None:
    def tiers(*, preempts_lower: bool) -> dict[str, int | TierRule]:
        return {
            "high": TierRule(name="high", value=10, preempts_lower=preempts_lower),
            "standard": 0,
        }

    tenants = (a_tenant(preemption=EAGER), a_tenant("gold", tier="high"))
    engine = an_engine(
        admitting_by_present_need(*tenants, tiers=tiers(preempts_lower=False)), max_num_seqs=1
    )
    engine.arrive("runs")
    engine.steps(3)
    engine.arrive("g", tenant="gold")
    engine.steps(3)
    assert not engine.preempted()
    engine.obey(admitting_by_present_need(*tenants, tiers=tiers(preempts_lower=True)))
    plan = engine.step()
    assert (plan.preempted, plan.admitted) == (("runs",), ("g",))


def test_a_raised_reserved_share_is_kept_from_the_next_step_on() -> None:
    def reserving(percent: int) -> PolicySnapshot:
        low = TierRule(name="low", value=-10, reserved_share_percent=percent)
        return admitting_by_present_need(
            a_tenant("gold", tier="high"),
            a_tenant("batch", tier="low"),
            tiers={"high": 10, "low": low},
        )

    engine = an_engine(reserving(0), max_num_seqs=2)
    engine.arrive(*numbered("g", 6), tenant="gold", output=10)
    engine.arrive("b", tenant="batch", output=10)
    engine.steps(15)
    assert running(engine, "batch") == 0
    engine.obey(reserving(50))
    engine.steps(12)
    assert engine.output("b")


def test_a_lowered_number_of_places_drains_down_and_takes_nobody_out() -> None:
    engine = an_engine(batching(max_num_seqs=6))
    engine.arrive(*numbered("r", 6), output=20)
    engine.arrive(*numbered("q", 4), output=20)
    engine.steps(3)
    engine.obey(batching(max_num_seqs=2))
    while running(engine) > 2:
        plan = engine.step()
        assert not plan.admitted
        assert not plan.preempted
    while engine.scheduler.has_work:
        engine.step()
        assert running(engine) <= 2
    assert all(len(trace.token_ids) == 20 for trace in engine.log.requests.values())


def test_a_raised_number_of_places_is_filled_with_the_next_step() -> None:
    engine = an_engine(batching(max_num_seqs=1))
    engine.arrive(*numbered("r", 4))
    engine.step()
    engine.obey(batching(max_num_seqs=4))
    assert engine.step().admitted == ("r1", "r2", "r3")


def test_a_changed_token_budget_bounds_the_next_step() -> None:
    engine = an_engine(batching(max_batched_tokens=64))
    engine.arrive("long", blocks=30)
    assert prefill_tokens(engine) == 64
    engine.obey(batching(max_batched_tokens=32))
    assert prefill_tokens(engine) == 32
    engine.obey(batching(max_batched_tokens=200))
    assert prefill_tokens(engine) == 200


def test_a_changed_chunk_maximum_bounds_the_next_chunk() -> None:
    engine = an_engine(batching())
    engine.obey(batching(prefill_chunk_max=48))
    engine.arrive("long", blocks=30)
    assert prefill_tokens(engine) == 48
    engine.obey(batching(prefill_chunk_max=100))
    assert prefill_tokens(engine) == 100


def test_a_changed_chunk_minimum_is_offered_whatever_the_decodes_targets() -> None:
    strict = a_tenant("strict", service=ServiceRule(itl_seconds=0.001))

    def policy(chunk_min: int) -> PolicySnapshot:
        rule = BatchingRule(prefill_chunk_min=chunk_min)
        return admitting_by_present_need(a_tenant(), strict, batching=rule)

    engine = an_engine(policy(16))
    engine.arrive("decodes", tenant="strict")
    engine.steps(2)
    engine.arrive("long", blocks=30)
    assert prefill_tokens(engine) == 16
    engine.obey(policy(40))
    assert prefill_tokens(engine) == 40


def test_a_changed_latency_target_bounds_the_next_chunk() -> None:
    def policy(itl_seconds: float | None) -> PolicySnapshot:
        chat = a_tenant("chat", service=ServiceRule(itl_seconds=itl_seconds))
        return admitting_by_present_need(a_tenant(), chat)

    engine = an_engine(policy(None))
    engine.arrive("decodes", tenant="chat")
    engine.steps(2)
    engine.arrive(*numbered("long", 4), blocks=9)
    engine.obey(policy(0.020))  # a step of 10 ms and 0.1 ms for each token of a prompt
    assert 32 <= prefill_tokens(engine) < 100
    engine.obey(policy(None))
    assert prefill_tokens(engine) > 400


def test_a_changed_number_of_partial_prefills_lets_more_prompts_be_read_at_a_time() -> None:
    tenants = [a_tenant(name) for name in ("a", "b", "c")]

    def policy(most: int) -> PolicySnapshot:
        return admitting_by_present_need(
            *tenants, batching=BatchingRule(max_batched_tokens=60, max_partial_prefills=most)
        )

    engine = an_engine(policy(1))
    for tenant in ("a", "b", "c"):
        engine.arrive(tenant, tenant=tenant, blocks=12)
    assert len(engine.step().rows) == 1
    engine.obey(policy(3))
    assert len(engine.step().rows) == 3


def test_a_changed_number_of_running_requests_drains_down_or_is_filled() -> None:
    engine = an_engine(admitting_by_present_need(a_tenant(max_running=4)))
    engine.arrive(*numbered("r", 10), output=20)
    engine.steps(2)
    assert running(engine) == 4
    engine.obey(admitting_by_present_need(a_tenant(max_running=2)))
    engine.step()
    assert running(engine) == 4
    assert not engine.preempted()
    while not engine.log.requests["r3"].is_finished:
        assert not engine.step().admitted
    engine.step()
    assert running(engine) == 2
    engine.obey(admitting_by_present_need(a_tenant(max_running=6)))
    engine.step()
    assert running(engine) == 6


def test_a_changed_queue_limit_is_for_new_requests_and_drops_none_that_wait() -> None:
    engine = an_engine(batching(), max_num_seqs=1)
    engine.arrive(*numbered("r", 6), output=4)
    engine.step()
    for limited in (a_tenant(max_queued=5), a_tenant(max_queued_tokens=5 * 8)):
        engine.obey(admitting_by_present_need(limited))
        engine.step()
        rejection = engine.submit(a_request(prompt=4, output=4, request_id="extra"))
        assert rejection is not None
        assert rejection.code is RejectionCode.TENANT_QUEUE_FULL
        assert engine.scheduler.num_waiting == 5
    engine.obey(admitting_by_present_need(a_tenant(max_queued=6)))
    engine.step()
    assert engine.submit(a_request(prompt=4, output=4, request_id="extra")) is None


def test_changed_lengths_are_for_new_requests() -> None:
    engine = an_engine(batching())
    engine.arrive("before", blocks=3, output=30)
    engine.step()
    engine.obey(admitting_by_present_need(a_tenant(max_prompt_tokens=20, max_output_tokens=5)))
    engine.step()
    rejection = engine.submit(a_request(prompt=21, output=30))
    assert rejection is not None
    assert rejection.code is RejectionCode.PROMPT_TOO_LONG
    engine.accept(a_request(prompt=20, output=30, request_id="after"))
    engine.drain()
    assert len(engine.output("before")) == 30
    assert len(engine.output("after")) == 5


def test_the_same_policy_again_changes_no_plan() -> None:
    def plans(*, is_repeated: bool) -> list[tuple[object, ...]]:
        policy = admitting_by_present_need(
            a_tenant("a", kv_nominal_percent=20, max_running=2, preemption=EAGER),
            a_tenant("b", tier="high"),
            batching=BatchingRule(wait_window_seconds=0.05),
        )
        engine = an_engine(policy, max_num_seqs=3)
        planned: list[tuple[object, ...]] = []
        for step in range(120):
            if step % 7 == 0:
                engine.arrive(f"r{step}", tenant="ab"[step % 2], blocks=1 + step % 9, output=30)
            if is_repeated and step % 5 == 0:
                engine.obey(policy)
            plan = engine.step()
            planned.append((plan.rows, plan.admitted, plan.preempted, plan.wake_at))
            if not plan.is_executable:
                engine.clock.advance(0.01)
        return planned

    assert plans(is_repeated=True) == plans(is_repeated=False)


def test_a_step_is_planned_under_one_revision_the_newest() -> None:
    engine = an_engine(batching())
    engine.arrive("first")
    assert engine.step().revision == 1
    engine.obey(batching(max_num_seqs=1))
    engine.scheduler.apply_policy(batching(max_num_seqs=2), 3)
    engine.arrive(*numbered("r", 4))
    plan = engine.step()
    assert plan.revision == 3
    assert plan.admitted == ("r0",)
