"""Who gets KV blocks, who waits for them, and who gives them back."""

from tidegate_engine.core.request import FinishReason
from tidegate_policies.rules import KvEstimate, PreemptionRule, WatermarkRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_run

OPTIMISTIC = KvEstimate.OPTIMISTIC  # so that memory does run short
TIERS = {"gold": 100, "standard": 0}
WIDE = WatermarkRule(low_percent=98, high_percent=99)  # watermarks out of the way


def test_nominal_blocks_are_there_when_their_owner_comes() -> None:
    policy = a_snapshot(a_tenant("owner", kv_nominal_percent=50), a_tenant("guest"))
    run = a_run(policy, blocks=16)
    run.submit(*(a_request("guest", prompt=12, output=20) for _ in range(6)))
    run.steps(4)
    assert run.scheduler.stats().tenants["guest"].kv_used_blocks <= 8
    run.submit(a_request("owner", prompt=30, output=2, request_id="o"))
    assert "o" in run.step().admitted
    run.drain()
    assert len(run.finished) == 7


def test_looking_at_the_numbers_changes_no_decision() -> None:
    def preempted(steps: int, *, is_watched: bool) -> list[tuple[str, ...]]:
        policy = a_snapshot(watermarks=WatermarkRule(low_percent=30, high_percent=70))
        run = a_run(policy, blocks=20)
        run.submit(*(a_request(prompt=4, output=20, request_id=f"r{n}") for n in range(3)))
        run.steps(steps)
        if is_watched:
            run.scheduler.stats()
        run.scheduler.cancel("r0", 0.0)
        return [run.step().preempted for _ in range(4)]

    for steps in range(10, 18):
        assert preempted(steps, is_watched=True) == preempted(steps, is_watched=False)


def test_above_the_low_watermark_only_nominal_gets_in() -> None:
    policy = a_snapshot(
        a_tenant("owner", kv_nominal_percent=10),
        a_tenant("guest"),
        watermarks=WatermarkRule(low_percent=40, high_percent=95),
    )
    run = a_run(policy, blocks=20)
    run.submit(*(a_request("guest", prompt=17, output=3) for _ in range(3)))
    run.steps(2)
    assert run.scheduler.stats().tenants["guest"].running == 2  # 10 blocks: past 40 %
    run.submit(a_request("owner", prompt=7, output=2, request_id="o"))
    assert run.step().admitted == ("o",)
    run.drain()


def test_above_the_high_watermark_borrowers_leave_down_to_the_low_one() -> None:
    policy = a_snapshot(
        a_tenant("gold", tier="gold"),
        a_tenant("batch", preemption=PreemptionRule(min_quantum_tokens=0)),
        tiers=TIERS,
        watermarks=WatermarkRule(low_percent=50, high_percent=70),
        kv_estimate=OPTIMISTIC,
    )
    run = a_run(policy, blocks=20)
    run.submit(a_request("batch", prompt=12, output=40), a_request("gold", prompt=12, output=40))
    run.submit(a_request("batch", prompt=12, output=40, request_id="newest-of-batch"))
    while not run.plans or not run.plans[-1].preempted:
        run.step()
    assert run.plans[-1].preempted == ("newest-of-batch",)
    assert run.scheduler.stats().kv_used_blocks <= 10
    run.drain()
    assert len(run.finished) == 3


def test_nobody_borrows_past_a_head_that_waits_for_room() -> None:
    policy = a_snapshot(
        a_tenant("gold", tier="gold"), a_tenant("batch"), tiers=TIERS, watermarks=WIDE
    )
    run = a_run(policy, blocks=10)
    run.submit(a_request("batch", prompt=12, output=8))
    run.step()
    run.submit(a_request("gold", prompt=28, request_id="large"))
    run.submit(a_request("batch", prompt=1, output=1, request_id="small"))
    run.drain()
    assert run.admitted[1:] == ["large", "small"]


def test_without_blocks_the_lowest_tier_yields_and_its_output_is_unharmed() -> None:
    alone = a_run(blocks=64)
    alone.submit(a_request("acme", prompt=8, output=24, request_id="victim"))
    alone.drain()

    policy = a_snapshot(
        a_tenant("gold", tier="gold"),
        a_tenant("acme"),
        tiers=TIERS,
        watermarks=WIDE,
        kv_estimate=OPTIMISTIC,
    )
    run = a_run(policy, blocks=10)
    run.submit(a_request("acme", prompt=8, output=24, request_id="victim"))
    run.submit(a_request("gold", prompt=(9, 8, 7, 6), output=24, request_id="g"))
    run.drain()
    assert [plan.preempted for plan in run.plans if plan.preempted] == [("victim",)]
    assert run.outputs["victim"] == alone.outputs["victim"]
    stats = run.scheduler.stats().tenants
    assert (stats["acme"].preempted, stats["gold"].preempted) == (1, 0)


def test_a_recompute_is_not_charged_again() -> None:
    policy = a_snapshot(a_tenant("a"), a_tenant("b"), watermarks=WIDE, kv_estimate=OPTIMISTIC)
    run = a_run(policy, blocks=10)
    run.submit(a_request("a", prompt=8, output=24))
    run.submit(a_request("b", prompt=(9, 8, 7, 6, 5, 4, 3, 2), output=24))
    run.drain()
    stats = run.scheduler.stats().tenants
    assert stats["b"].recomputed_tokens > 0
    assert stats["a"].service == stats["b"].service == 8 + 2 * 24
    assert [stats[t].prompt_tokens for t in "ab"] == [8, 8]
    assert [stats[t].output_tokens for t in "ab"] == [24, 24]


def test_one_request_alone_that_outgrows_the_pool_ends_with_length() -> None:
    run = a_run(a_snapshot(watermarks=WIDE), blocks=4)
    run.submit(a_request(prompt=4, output=500, request_id="r"))
    run.drain()
    assert run.finished == {"r": FinishReason.LENGTH}
    assert len(run.outputs["r"]) == 13  # 16 slots, 4 of them prompt, and one token without


def test_a_request_cut_off_by_a_raised_nominal_ends_with_length() -> None:
    run = a_run(a_snapshot(a_tenant("a"), a_tenant("b"), watermarks=WIDE), blocks=10)
    run.submit(a_request("a", prompt=4, output=36, request_id="r"))
    run.steps(6)
    owner = a_tenant("b", kv_nominal_percent=70, kv_lendable_percent=0)
    policy = a_snapshot(a_tenant("a"), owner, watermarks=WIDE)
    run.scheduler.apply_policy(policy, 2)
    run.drain()
    assert run.finished == {"r": FinishReason.LENGTH}
    assert len(run.outputs["r"]) < 36
    assert run.scheduler.stats().tenants["a"].preempted == 0


def test_a_queued_prompt_that_a_policy_made_too_large_does_not_block_the_queue() -> None:
    run = a_run(a_snapshot(a_tenant("a"), a_tenant("b"), watermarks=WIDE), blocks=10)
    run.submit(a_request("a", prompt=30, request_id="large"))
    owner = a_tenant("b", kv_nominal_percent=70, kv_lendable_percent=0)
    policy = a_snapshot(a_tenant("a"), owner, watermarks=WIDE)
    run.scheduler.apply_policy(policy, 2)
    run.submit(a_request("a", prompt=4, request_id="small"))
    run.drain()
    assert run.finished["large"] is FinishReason.LENGTH
    assert (len(run.outputs["small"]), "large" in run.outputs) == (2, False)


def test_what_a_policy_made_too_large_ends_also_beside_busy_neighbours() -> None:
    tenants = [a_tenant("a"), a_tenant("c")]
    run = a_run(a_snapshot(*tenants, a_tenant("b"), watermarks=WIDE), blocks=10, max_num_seqs=2)
    # Of different lengths, so that the batch is never empty.
    run.submit(*(a_request("b", output=5 + 3 * (n % 2)) for n in range(20)))
    run.step()
    run.submit(a_request("a", prompt=30, request_id="large"), a_request("c", request_id="small"))
    owner = a_tenant("b", kv_nominal_percent=70, kv_lendable_percent=0)
    policy = a_snapshot(*tenants, owner, watermarks=WIDE)
    run.scheduler.apply_policy(policy, 2)
    while "small" not in run.finished:
        run.step()
    assert run.finished["large"] is FinishReason.LENGTH
    assert run.scheduler.stats().tenants["b"].waiting > 0


def test_a_large_borrower_runs_beside_tenants_that_are_always_busy_within_their_nominal() -> None:
    policy = a_snapshot(
        a_tenant("gold", tier="gold", kv_nominal_percent=30),
        a_tenant("batch"),
        a_tenant("silver"),
        tiers=TIERS,
    )
    run = a_run(policy, blocks=100, max_batched_tokens=300)
    run.submit(a_request("batch", prompt=64 * 4 - 8, output=8, request_id="large"))
    run.submit(*(a_request("silver", request_id=f"s{n}") for n in range(5)))
    for _ in range(200):
        gold = run.scheduler.stats().tenants["gold"]
        run.submit(*(a_request("gold", prompt=12, output=8) for _ in range(5 - gold.running)))
        run.step()
    assert {"large", *(f"s{n}" for n in range(5))} <= set(run.finished)
    assert run.scheduler.stats().tenants["batch"].preempted == 0


def test_the_only_borrower_is_not_thrown_out_to_come_back_at_once() -> None:
    policy = a_snapshot(
        a_tenant("gold", kv_nominal_percent=50),
        a_tenant("batch"),
        watermarks=WatermarkRule(low_percent=60, high_percent=70),
    )
    run = a_run(policy, blocks=20)
    run.submit(a_request("batch", prompt=28, output=12), a_request("gold", prompt=24, output=14))
    run.drain()
    assert run.scheduler.stats().tenants["batch"].preempted == 0


def test_together_a_block_more_than_the_pool_still_finishes() -> None:
    run = a_run(a_snapshot(watermarks=WIDE), blocks=9)
    run.submit(*(a_request(prompt=8, output=12, request_id=f"r{n}") for n in range(2)))
    run.drain()
    assert [len(run.outputs[f"r{n}"]) for n in range(2)] == [12, 12]
