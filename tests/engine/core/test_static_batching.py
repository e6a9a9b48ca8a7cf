"""Static and bucketed batching: who shares a batch, what is padding, when blocks are free."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import PlanRow, SampledToken, StepPlan, StepResult
from tidegate_engine.core.request import FinishReason, RejectionCode, TokenOutput
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_policies.rules import BatchingRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request


def a_static_scheduler(
    *, blocks: int = 64, is_bucketed: bool = False, window: float = 0.0, **limits: int
) -> StaticScheduler:
    scheduler = StaticScheduler(
        num_blocks=blocks,
        block_size=4,
        limits=EngineLimits(
            **{"max_num_seqs": 4, "max_batched_tokens": 64, **limits}, wait_window_seconds=window
        ),
        is_bucketed=is_bucketed,
    )
    scheduler.apply_policy(a_snapshot(), 1)
    scheduler.plan_step(0.0)
    return scheduler


def commit(scheduler: StaticScheduler, plan: StepPlan) -> tuple[TokenOutput, ...]:
    tokens = {row.request_id: SampledToken(token_id=7) for row in plan.rows if row.samples}
    outputs = scheduler.commit_step(plan, StepResult(tokens=tokens), 0.0)
    scheduler.check_invariants()
    return outputs


def step(scheduler: StaticScheduler) -> StepPlan:
    plan = scheduler.plan_step(0.0)
    if plan.rows:
        commit(scheduler, plan)
    return plan


def drain(scheduler: StaticScheduler) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(step(scheduler))
    return plans


def shape(row: PlanRow) -> tuple[str, int, int, bool]:
    return row.request_id, row.start, len(row.token_ids), row.is_padding


def test_prompts_are_padded_to_the_longest() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="short", prompt=3), 0.0)
    scheduler.submit(a_request(request_id="long", prompt=5), 0.0)

    plan = step(scheduler)

    assert [shape(row) for row in plan.rows] == [
        ("short", 0, 3, False),
        ("short", 3, 2, True),
        ("long", 0, 5, False),
    ]
    assert [row.samples for row in plan.rows] == [True, False, True]
    assert plan.admitted == ("short", "long")


def test_padded_prompts_are_read_in_chunks_of_the_token_budget() -> None:
    scheduler = a_static_scheduler(max_batched_tokens=4)
    scheduler.submit(a_request(request_id="short", prompt=2), 0.0)
    scheduler.submit(a_request(request_id="long", prompt=5), 0.0)

    chunks = [[shape(row) for row in step(scheduler).rows] for _ in range(3)]

    assert chunks == [
        [("short", 0, 2, False), ("short", 2, 2, True)],
        [("short", 4, 1, True), ("long", 0, 3, False)],
        [("long", 3, 2, False)],
    ]


def test_who_has_finished_decodes_padding_until_the_last_has() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="brief", prompt=4, output=1), 0.0)
    scheduler.submit(a_request(request_id="wordy", prompt=4, output=3), 0.0)
    step(scheduler)

    decodes = [[shape(row) for row in plan.rows] for plan in drain(scheduler)]

    assert decodes == [
        [("brief", 4, 1, True), ("wordy", 4, 1, False)],
        [("brief", 5, 1, True), ("wordy", 5, 1, False)],
    ]
    assert scheduler.stats().kv_used_blocks == 0


def test_padding_never_samples_and_stays_inside_its_block_table() -> None:
    scheduler = a_static_scheduler(max_batched_tokens=5)
    for length, output in ((1, 9), (7, 1), (4, 3)):
        scheduler.submit(a_request(prompt=length, output=output), 0.0)

    rows = [row for plan in drain(scheduler) for row in plan.rows]

    assert any(row.is_padding for row in rows)
    assert not any(row.is_padding and row.samples for row in rows)
    assert all(row.end <= len(row.block_ids) * 4 for row in rows)


def test_nobody_joins_a_batch_that_has_begun() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="first", output=3), 0.0)
    step(scheduler)
    scheduler.submit(a_request(request_id="second", output=1), 0.0)

    plans = drain(scheduler)

    assert [{row.request_id for row in plan.rows} for plan in plans] == [
        {"first"},
        {"first"},
        {"second"},
    ]


def test_everybody_holds_the_blocks_of_the_longest_prompt_with_the_longest_output() -> None:
    scheduler = a_static_scheduler(blocks=12)
    for request_id, prompt, output in (("a", 9, 2), ("b", 2, 4), ("c", 2, 2)):
        scheduler.submit(a_request(request_id=request_id, prompt=prompt, output=output), 0.0)

    plan = step(scheduler)

    # 9 + 4 - 1 tokens are 3 blocks each.
    assert {row.request_id: len(row.block_ids) for row in plan.rows} == {"a": 3, "b": 3, "c": 3}
    assert scheduler.stats().kv_used_blocks == 9


def test_the_batch_ends_before_the_first_whose_worst_case_does_not_fit() -> None:
    scheduler = a_static_scheduler(blocks=8)
    for request_id, prompt in (("a", 8), ("b", 30), ("c", 8)):
        scheduler.submit(a_request(request_id=request_id, prompt=prompt, output=1), 0.0)

    admitted = [plan.admitted for plan in drain(scheduler) if plan.admitted]

    assert admitted == [("a",), ("b",), ("c",)]


def test_a_batch_is_no_larger_than_the_policy_allows() -> None:
    scheduler = a_static_scheduler(max_num_seqs=4)
    scheduler.apply_policy(a_snapshot(batching=BatchingRule(max_num_seqs=2)), 2)
    for number in range(3):
        scheduler.submit(a_request(request_id=f"r{number}", output=1), 0.0)

    plan = step(scheduler)

    assert plan.admitted == ("r0", "r1")
    assert plan.revision == 2


def test_a_bucketed_batch_holds_one_bucket_of_lengths_that_of_the_oldest() -> None:
    scheduler = a_static_scheduler(is_bucketed=True)
    for request_id, prompt in (("a", 16), ("b", 17), ("c", 9), ("d", 32)):
        scheduler.submit(a_request(request_id=request_id, prompt=prompt, output=1), 0.0)

    admitted = [plan.admitted for plan in drain(scheduler) if plan.admitted]

    assert admitted == [("a", "c"), ("b", "d")]


def test_a_first_arrival_is_held_until_the_window_ends() -> None:
    scheduler = a_static_scheduler(window=0.5)
    scheduler.submit(a_request(), 1.0)

    held = scheduler.plan_step(1.2)
    started = scheduler.plan_step(1.5)

    assert (held.rows, held.wake_at) == ((), 1.5)
    assert started.rows


def test_a_full_batch_starts_before_the_window_ends() -> None:
    scheduler = a_static_scheduler(window=0.5, max_num_seqs=2)
    scheduler.submit(a_request(), 1.0)
    scheduler.submit(a_request(), 1.1)

    assert len(scheduler.plan_step(1.1).admitted) == 2


def test_a_cancelled_request_is_in_no_later_step_and_its_blocks_are_free() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="stays", output=3), 0.0)
    scheduler.submit(a_request(request_id="goes", output=9), 0.0)
    plan = step(scheduler)
    used = scheduler.stats().kv_used_blocks

    assert scheduler.cancel("goes", 0.0) is Phase.RUNNING
    assert scheduler.cancel("goes", 0.0) is None

    assert scheduler.stats().kv_used_blocks == used - len(plan.rows[-1].block_ids)
    assert {row.request_id for plan in drain(scheduler) for row in plan.rows} == {"stays"}
    assert scheduler.stats().tenants["acme"].cancelled == 1


def test_cancelling_the_last_that_still_decodes_ends_the_batch() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="brief", output=1), 0.0)
    scheduler.submit(a_request(request_id="wordy", output=9), 0.0)
    step(scheduler)

    scheduler.cancel("wordy", 0.0)

    assert not scheduler.has_work
    assert scheduler.stats().kv_used_blocks == 0


def test_a_waiting_request_that_is_cancelled_is_never_admitted() -> None:
    scheduler = a_static_scheduler()
    for number in range(3):
        scheduler.submit(a_request(request_id=f"r{number}", output=1), 0.0)

    assert scheduler.cancel("r1", 0.0) is Phase.WAITING

    assert step(scheduler).admitted == ("r0", "r2")


def test_a_request_that_was_finished_from_outside_goes_on_as_padding() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="stopped", output=9), 0.0)
    scheduler.submit(a_request(request_id="other", output=2), 0.0)
    step(scheduler)

    assert scheduler.finish("stopped", 0.0)
    plan = step(scheduler)

    assert [row.is_padding for row in plan.rows] == [True, False]
    assert not scheduler.has_work
    assert scheduler.stats().tenants["acme"].finished == 2


def test_a_request_that_was_finished_while_its_step_was_computed_gets_no_token() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="stopped", output=9), 0.0)
    scheduler.submit(a_request(request_id="other", output=9), 0.0)
    plan = scheduler.plan_step(0.0)

    scheduler.finish("stopped", 0.0)

    assert [output.request_id for output in commit(scheduler, plan)] == ["other"]


def test_an_id_may_be_used_again_while_its_first_bearer_is_padding() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="again", output=1), 0.0)
    scheduler.submit(a_request(request_id="other", output=3), 0.0)
    step(scheduler)
    scheduler.submit(a_request(request_id="again", output=1), 0.0)
    with pytest.raises(ValueError, match="'again' is live already"):
        scheduler.submit(a_request(request_id="again"), 0.0)

    assert scheduler.cancel("again", 0.0)

    assert len(step(scheduler).rows) == 2  # its first bearer still pads


def test_a_stop_token_ends_a_request() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="one", output=9, stop_token_ids=(7,)), 0.0)

    (output,) = commit(scheduler, scheduler.plan_step(0.0))

    assert output.finish_reason is FinishReason.STOP


def test_an_output_is_clipped_to_what_the_pool_can_hold() -> None:
    scheduler = a_static_scheduler(blocks=4)
    scheduler.submit(a_request(prompt=10, output=1000), 0.0)

    drain(scheduler)

    assert scheduler.stats().tenants["acme"].output_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "code"),
    [(0, RejectionCode.EMPTY_PROMPT), (16, RejectionCode.PROMPT_TOO_LONG)],
)
def test_a_prompt_that_can_never_run_is_refused(prompt: int, code: RejectionCode) -> None:
    scheduler = a_static_scheduler(blocks=4)

    rejection = scheduler.submit(a_request(prompt=prompt), 0.0)

    assert rejection is not None
    assert rejection.code is code


def test_a_full_queue_refuses() -> None:
    scheduler = a_static_scheduler(max_waiting=1)
    scheduler.submit(a_request(), 0.0)

    rejection = scheduler.submit(a_request(), 0.0)

    assert rejection is not None
    assert rejection.code is RejectionCode.QUEUE_FULL


def test_without_a_policy_nobody_is_let_in() -> None:
    scheduler = StaticScheduler(num_blocks=4, block_size=4, limits=EngineLimits())

    rejection = scheduler.submit(a_request(), 0.0)

    assert rejection is not None
    assert rejection.code is RejectionCode.NO_POLICY


def test_a_plan_is_committed_before_the_next_is_made() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(), 0.0)
    plan = scheduler.plan_step(0.0)

    with pytest.raises(RuntimeError, match="step 1 was planned and not committed"):
        scheduler.plan_step(0.0)
    with pytest.raises(KeyError, match="no token"):
        scheduler.commit_step(plan, StepResult(), 0.0)

    assert commit(scheduler, plan)


def test_the_requests_of_an_abandoned_step_are_dropped() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request(request_id="brief", output=1, prompt=2), 0.0)
    scheduler.submit(a_request(request_id="wordy", output=9, prompt=4), 0.0)
    step(scheduler)

    assert scheduler.abandon_step(scheduler.plan_step(0.0), 0.0) == ("wordy",)

    assert not scheduler.has_work
    scheduler.check_invariants()


def test_tenants_are_counted_apart_and_forgotten_once_they_left() -> None:
    scheduler = a_static_scheduler()
    scheduler.submit(a_request("acme", prompt=3, output=2), 0.0)
    scheduler.submit(a_request("zeta", prompt=5, output=1), 0.0)
    step(scheduler)

    tenants = scheduler.stats().tenants
    assert (tenants["acme"].running, tenants["zeta"].running) == (1, 0)
    assert (tenants["acme"].prompt_tokens, tenants["zeta"].prompt_tokens) == (3, 5)
    assert (tenants["acme"].service, tenants["zeta"].service) == (5.0, 7.0)

    scheduler.submit(a_request("zeta", output=1), 0.0)
    scheduler.apply_policy(a_snapshot(a_tenant("acme")), 2)
    step(scheduler)
    assert list(scheduler.stats().tenants) == ["acme", "zeta"]

    drain(scheduler)
    scheduler.apply_policy(a_snapshot(a_tenant("acme")), 3)
    scheduler.plan_step(0.0)
    assert list(scheduler.stats().tenants) == ["acme"]


lengths = st.tuples(st.integers(1, 20), st.integers(1, 12))


@given(requests=st.lists(lengths, min_size=1, max_size=12), is_bucketed=st.booleans())
def test_everybody_gets_their_output_and_every_block_comes_back(
    *, requests: list[tuple[int, int]], is_bucketed: bool
) -> None:
    scheduler = a_static_scheduler(blocks=16, max_batched_tokens=13, is_bucketed=is_bucketed)
    for number, (prompt, output) in enumerate(requests):
        scheduler.submit(a_request(request_id=f"r{number}", prompt=prompt, output=output), 0.0)

    plans = drain(scheduler)

    sampled = [row.request_id for plan in plans for row in plan.rows if row.samples]
    assert [sampled.count(f"r{number}") for number in range(len(requests))] == [
        output for _, output in requests
    ]
    assert scheduler.stats().kv_used_blocks == 0
