"""The step, arrivals, policy changes, cancellation."""

import pytest

from tidegate_engine.core.plan import StepResult
from tidegate_engine.core.request import FinishReason, RejectionCode
from tidegate_policies.rules import BatchingRule, UnknownAction, UnknownTenantsRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run, a_scheduler, rows_of

TIERS = {"gold": 100, "standard": 0}
WIDE = WatermarkRule(low_percent=98, high_percent=99)  # watermarks out of the way


# -- the step -------------------------------------------------------------------------------------


def test_prefill_computes_the_prompt_and_decode_one_token() -> None:
    run = a_run()
    run.submit(a_request(prompt=5, output=3, request_id="r"))
    run.drain()
    assert [rows_of(plan) for plan in run.plans] == [[("r", 0, 5)], [("r", 5, 1)], [("r", 6, 1)]]
    assert run.finished == {"r": FinishReason.LENGTH}


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes() -> None:
    run = a_run(max_batched_tokens=16)
    run.submit(a_request(prompt=3, output=9, request_id="short"))
    run.step()
    run.submit(a_request(prompt=40, output=2, request_id="long"))
    run.steps(3)
    assert [rows_of(plan) for plan in run.plans[1:]] == [
        [("short", 3, 1), ("long", 0, 15)],
        [("short", 4, 1), ("long", 15, 15)],
        [("short", 5, 1), ("long", 30, 10)],
    ]
    assert [plan.rows[-1].samples for plan in run.plans[1:]] == [False, False, True]


def test_a_stop_token_ends_a_request_early() -> None:
    run = a_run()
    run.submit(a_request(output=50, request_id="r", stop_token_ids=tuple(range(1000))))
    run.drain()
    assert run.finished == {"r": FinishReason.STOP}
    assert len(run.outputs["r"]) == 1


def test_a_plan_must_be_committed_before_the_next() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(), 0.0)
    plan = scheduler.plan_step(0.0)
    with pytest.raises(RuntimeError, match="not committed"):
        scheduler.plan_step(0.0)
    with pytest.raises(KeyError, match="no token for requests"):
        scheduler.commit_step(plan, StepResult(), 0.0)


def test_an_abandoned_step_drops_its_requests_and_frees_their_blocks() -> None:
    scheduler = a_scheduler()
    scheduler.submit(a_request(request_id="r"), 0.0)
    assert scheduler.abandon_step(scheduler.plan_step(0.0), 0.0) == ("r",)
    assert (scheduler.has_work, scheduler.stats().kv_used_blocks) == (False, 0)


def test_nothing_of_a_broken_request_is_found_by_its_prompt() -> None:
    run = a_run()
    run.submit(a_request(prompt=20, output=4, request_id="broken"))
    run.step()  # its prompt is read, and known
    run.scheduler.abandon_step(run.scheduler.plan_step(0.0), 0.0)
    run.submit(a_request(prompt=20, output=4, request_id="next"))
    run.drain()
    assert run.scheduler.stats().tenants["acme"].cached_tokens == 0


def test_same_arrivals_give_the_same_plans() -> None:
    def trace() -> list[list[tuple[str, int, int]]]:
        run = a_run(blocks=6, max_batched_tokens=7)
        for number, size in enumerate([3, 9, 4, 7]):
            run.submit(a_request(prompt=size, output=5, request_id=f"r{number}"))
        run.drain()
        return [rows_of(plan) for plan in run.plans]

    assert trace() == trace()


# -- arrival --------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_is_refused_and_the_one_behind_it_runs() -> None:
    run = a_run(blocks=4)
    rejection = run.scheduler.submit(a_request(prompt=16), 0.0)
    assert rejection is not None
    assert rejection.code is RejectionCode.PROMPT_TOO_LONG
    limit = "the limit is 15: one less than tenant 'acme' may hold in KV"
    assert rejection.message == f"the prompt has 16 tokens, {limit}"
    run.submit(a_request(prompt=15, output=99, request_id="r"))
    run.drain()
    assert len(run.outputs["r"]) == 2  # one for the last slot, one that needs none


def test_the_tenants_own_limits_hold() -> None:
    run = a_run(a_snapshot(a_tenant(max_prompt_tokens=8, max_output_tokens=3)))
    assert run.scheduler.submit(a_request(prompt=9), 0.0) is not None
    run.submit(a_request(prompt=8, output=50, request_id="r"))
    run.drain()
    assert len(run.outputs["r"]) == 3


def test_undeclared_tenants_and_engines_without_policy_let_nobody_in() -> None:
    rejection = a_scheduler().submit(a_request("stranger"), 0.0)
    assert rejection is not None
    assert rejection.code is RejectionCode.UNKNOWN_TENANT


def test_unknown_tenants_run_within_their_limit_when_admitted() -> None:
    unknown = UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard", max_running=1)
    run = a_run(a_snapshot(unknown_tenants=unknown))
    run.submit(*(a_request("unknown", output=3) for _ in range(3)), a_request(output=3))
    run.step()
    assert run.scheduler.stats().tenants["unknown"].running == 1
    assert run.scheduler.stats().tenants["acme"].running == 1
    run.drain()


def test_the_queue_is_bounded() -> None:
    run = a_run(max_waiting=2)
    run.submit(a_request(), a_request())
    rejection = run.scheduler.submit(a_request(), 0.0)
    assert rejection is not None
    assert (rejection.code, rejection.retry_after_seconds) == (RejectionCode.QUEUE_FULL, 1.0)


def test_a_part_of_the_queue_stays_free_for_every_other_tenant() -> None:
    run = a_run(a_snapshot(a_tenant("crowd"), a_tenant("calm"), a_tenant("shy")), max_waiting=24)

    def refused(tenant: str, times: int) -> list[bool]:
        return [run.scheduler.submit(a_request(tenant), 0.0) is not None for _ in range(times)]

    assert refused("crowd", 22) == [False] * 20 + [True] * 2
    assert refused("calm", 3) == [False] * 2 + [True]
    assert refused("shy", 3) == [False] * 2 + [True]
    assert refused("crowd", 1) == [True]
    assert run.scheduler.num_waiting == 24


def test_with_more_tenants_than_a_quarter_of_the_queue_has_places_each_may_have_one() -> None:
    tenants = [f"tenant{number}" for number in range(20)]
    run = a_run(a_snapshot(a_tenant("crowd"), *map(a_tenant, tenants)), max_waiting=8)

    def is_refused(tenant: str) -> bool:
        return run.scheduler.submit(a_request(tenant), 0.0) is not None

    assert [is_refused("crowd") for _ in range(8)] == [False] * 6 + [True] * 2
    assert not is_refused("tenant0")
    assert [is_refused(tenant) for tenant in tenants[:5]] == [True] + [False] * 3 + [True]
    assert run.scheduler.num_waiting == 10  # a quarter beyond the limit, and no more


# -- policy ---------------------------------------------------------------------------------------


def test_a_policy_is_in_force_from_the_next_plan_on_and_named_in_it() -> None:
    run = a_run()
    run.submit(a_request(output=5))
    run.step()
    run.scheduler.apply_policy(a_snapshot(a_tenant(weight=5)), 9)
    assert run.scheduler.revision == 1
    run.step()
    assert [plan.revision for plan in run.plans] == [1, 9]


def test_a_policy_takes_effect_without_any_work() -> None:
    scheduler = a_scheduler()
    scheduler.apply_policy(a_snapshot(), 2)
    assert not scheduler.plan_step(0.0).rows
    assert scheduler.revision == 2


def test_a_lowered_batch_drains_down() -> None:
    run = a_run(max_num_seqs=4)
    run.submit(*(a_request(output=n) for n in (4, 6, 8, 10, 12)))
    run.step()
    run.scheduler.apply_policy(a_snapshot(batching=BatchingRule(max_num_seqs=1)), 2)
    sizes = [len(run.step().rows) for _ in range(10)]
    assert sizes[0] == 4
    assert sizes[-1] == 1
    run.drain()
    assert len(run.finished) == 5


def test_more_decodes_than_tokens_in_the_budget_all_go_on() -> None:
    run = a_run()
    run.submit(*(a_request(output=9) for _ in range(4)))
    run.step()
    tight = BatchingRule(max_num_seqs=1, max_batched_tokens=1)
    run.scheduler.apply_policy(a_snapshot(batching=tight), 2)
    assert len(run.step().rows) == 4


def test_unknown_requests_in_the_queue_keep_their_limit_when_new_ones_are_refused() -> None:
    unknown = UnknownTenantsRule(action=UnknownAction.ADMIT, tier="standard", max_running=1)
    run = a_run(a_snapshot(unknown_tenants=unknown))
    run.submit(*(a_request("unknown", output=6) for _ in range(3)))
    run.step()
    run.scheduler.apply_policy(a_snapshot(), 2)
    run.step()
    assert run.scheduler.stats().tenants["unknown"].running == 1
    run.drain()


def test_requests_of_a_deleted_tenant_finish_and_new_ones_are_refused() -> None:
    run = a_run(a_snapshot(a_tenant("gone"), a_tenant("kept")), max_num_seqs=1)
    run.submit(a_request("gone", request_id="g1"), a_request("gone", request_id="g2"))
    run.scheduler.apply_policy(a_snapshot(a_tenant("kept")), 2)
    run.step()
    assert run.scheduler.submit(a_request("gone"), 0.0) is not None
    run.drain()
    assert set(run.finished) == {"g1", "g2"}
    assert "gone" not in run.scheduler.stats().tenants


def test_a_changed_tier_changes_the_order() -> None:
    def policy(batch_tier: str) -> PolicySnapshot:
        return a_snapshot(
            a_tenant("silver"), a_tenant("batch", tier=batch_tier), tiers={**TIERS, "low": -5}
        )

    run = a_run(policy("low"), max_num_seqs=1)
    for number in range(4):
        run.submit(a_request("batch", request_id=f"b{number}"))
        run.submit(a_request("silver", request_id=f"s{number}"))
    run.steps(4)
    run.scheduler.apply_policy(policy("gold"), 2)
    run.drain()
    assert run.admitted == ["s0", "s1", "b0", "b1", "b2", "b3", "s2", "s3"]


def test_a_tenant_that_is_never_served_lends_newcomers_no_credit() -> None:
    run = a_run(
        a_snapshot(a_tenant("old"), a_tenant("new"), a_tenant("spare", weight=0)), max_num_seqs=1
    )
    run.submit(a_request("spare", output=6), *(a_request("old", output=6) for _ in range(200)))
    run.steps(300)
    served = run.scheduler.stats().tenants["old"].output_tokens
    run.submit(*(a_request("new", output=6) for _ in range(200)))
    run.steps(300)
    stats = run.scheduler.stats().tenants
    assert stats["new"].output_tokens == pytest.approx(stats["old"].output_tokens - served, abs=12)


def test_a_tenant_that_gets_a_weight_is_not_charged_for_its_time_without() -> None:
    run = a_run(a_snapshot(a_tenant("paying"), a_tenant("spare", weight=0)), max_num_seqs=1)
    run.submit(*(a_request("spare", output=6) for _ in range(200)))
    run.steps(200)
    served = run.scheduler.stats().tenants["spare"].output_tokens
    run.submit(*(a_request("paying", output=6) for _ in range(200)))
    run.scheduler.apply_policy(a_snapshot(a_tenant("paying"), a_tenant("spare")), 2)
    run.steps(300)
    stats = run.scheduler.stats().tenants
    assert stats["spare"].output_tokens - served == pytest.approx(
        stats["paying"].output_tokens, abs=12
    )


def test_a_tenant_that_changes_tier_is_neither_punished_nor_favoured_for_its_past() -> None:
    def policy(batch_tier: str) -> PolicySnapshot:
        return a_snapshot(a_tenant("silver"), a_tenant("batch", tier=batch_tier), tiers=tiers)

    tiers = {"standard": 0, "low": -5}
    run = a_run(policy("low"), max_num_seqs=1)
    run.submit(*(a_request("batch", output=6) for _ in range(200)))
    run.steps(300)
    served = run.scheduler.stats().tenants["batch"].output_tokens
    run.submit(*(a_request("silver", output=6) for _ in range(200)))
    run.steps(1)
    run.scheduler.apply_policy(policy("standard"), 2)
    run.steps(300)
    stats = run.scheduler.stats().tenants
    assert stats["batch"].output_tokens - served == pytest.approx(
        stats["silver"].output_tokens, abs=18
    )


# -- cancellation ---------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_at_once_and_frees_its_blocks() -> None:
    run = a_run()
    run.submit(a_request(output=50, request_id="c"), a_request(output=5, request_id="k"))
    run.steps(2)
    used = run.scheduler.stats().kv_used_blocks
    assert run.scheduler.cancel("c", 0.0)
    assert run.scheduler.stats().kv_used_blocks < used
    assert "c" not in [row.request_id for row in run.step().rows]
    assert not run.scheduler.cancel("c", 0.0)
    run.drain()
    assert run.scheduler.stats().tenants["acme"].cancelled == 1


def test_a_cancel_during_a_step_drops_the_token_of_that_step() -> None:
    run = a_run()
    run.submit(a_request(output=5, request_id="c"))
    plan = run.scheduler.plan_step(0.0)
    run.scheduler.cancel("c", 0.0)
    assert run.scheduler.commit_step(plan, run.executor.execute(plan), 0.0) == ()
    assert not run.scheduler.has_work


def test_a_cancelled_waiting_request_is_skipped() -> None:
    run = a_run(max_num_seqs=1)
    run.submit(*(a_request(request_id=f"r{n}") for n in range(4)))
    run.step()
    assert run.scheduler.cancel("r1", 0.0)
    run.drain()
    assert run.admitted == ["r0", "r2", "r3"]


def test_cancelled_requests_of_a_starved_tenant_leave_nothing_behind() -> None:
    policy = a_snapshot(a_tenant("gold", tier="gold"), a_tenant("batch"), tiers=TIERS)
    run = a_run(policy, max_num_seqs=1)
    run.submit(*(a_request("gold", output=6) for _ in range(20)))
    run.step()
    for number in range(500):
        run.submit(a_request("batch", request_id=f"b{number}"))
        run.scheduler.cancel(f"b{number}", 0.0)
        run.scheduler.check_invariants()
    run.drain()


def test_ended_requests_are_swept_also_when_the_queue_drains_by_admission() -> None:
    run = a_run(max_num_seqs=1)
    run.submit(*(a_request(output=1, request_id=f"r{n}") for n in range(140)))
    for number in range(40, 140):
        run.scheduler.cancel(f"r{number}", 0.0)
    run.drain()  # verifies the bound after every step
    assert len(run.finished) == 40


def test_a_stop_string_ends_a_request_as_finished() -> None:
    run = a_run()
    run.submit(a_request(output=50, request_id="r"))
    run.steps(3)
    assert run.scheduler.finish("r", 0.0)
    stats = run.scheduler.stats().tenants["acme"]
    assert (stats.finished, stats.cancelled, run.scheduler.has_work) == (1, 0, False)
