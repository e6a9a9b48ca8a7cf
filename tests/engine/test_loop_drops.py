"""Requests that leave the engine before their end, and what is counted of them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import Expiry, ExpiryCause
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.sequence import Phase
from tidegate_engine.events import CancelCause, CancelKey
from tidegate_engine.executor.base import Executor, ExecutorError
from tidegate_engine.loop import EngineLoop
from tidegate_policies.rules import PreemptionMode, PreemptionRule, ServiceRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import StepGate, a_paced_executor, a_scheduler_of
from tidegate_testing.loops import BreakingExecutor, Recorder, a_loop, wait_for_step
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_scheduler


class ForgetfulScheduler(Scheduler):
    """Says that it has cancelled a request, and leaves it in the batch."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4096, block_size=16, limits=EngineLimits())
        self.apply_policy(a_snapshot(), 1)
        self.plan_step(0.0)

    def cancel(self, request_id: str, now: float) -> Phase | None:  # noqa: ARG002
        return Phase.RUNNING


def on_hold(**service: Any) -> PolicySnapshot:
    """Build a policy under which acme's requests wait."""
    return a_snapshot(a_tenant(stop=StopPolicy.HOLD, service=ServiceRule(**service)))


def a_one_slot_scheduler(executor: Executor) -> Scheduler:
    """Build a scheduler in which gold displaces batch, by a swap."""
    scheduler = a_scheduler_of(executor, EngineLimits(max_num_seqs=1))
    swaps = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    policy = a_snapshot(
        a_tenant("batch", tier="low", preemption=swaps),
        a_tenant("gold", tier="high"),
        tiers={"high": 10, "low": 0},
    )
    scheduler.apply_policy(policy, 1)
    scheduler.plan_step(time.monotonic())
    return scheduler


@contextmanager
def a_displaced_request() -> Iterator[tuple[EngineLoop, Recorder, StepGate]]:
    """Run a loop in which the request `batch` is swapped out for the request `gold`.

    They don't fit the pool together, so that 9 of batch's 19 blocks are overwritten at least. A
    step is held that computes gold.
    """
    gate = StepGate()
    executor = a_paced_executor(gate, blocks=32, host_blocks=32)
    with a_loop(gate, scheduler=a_one_slot_scheduler(executor), executor=executor) as (
        loop,
        recorder,
    ):
        loop.submit(a_request("batch", prompt=300, output=150, request_id="batch"))
        gate.shut()
        loop.submit(a_request("gold", prompt=tuple(range(352)), output=32, request_id="gold"))

        def is_gold_running() -> bool:
            gate.let_one_pass()
            return recorder.tokens_of("gold") > 0

        eventually(is_gold_running, "gold's first token")
        gate.shut()
        yield loop, recorder, gate


def holds_nothing(loop: EngineLoop) -> bool:
    """Whether no block of the device or the host is in use."""
    stats = loop.stats().result().scheduler
    return stats.kv_used_blocks == stats.host_used_blocks == 0


def test_no_step_planned_after_a_cancel_contains_the_request() -> None:
    with a_loop() as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        assert loop.cancel("long", CancelCause.DELETE).result()
        steps = len(recorder.reports)
        stats = loop.stats().result()
        assert stats.scheduler.running == stats.scheduler.kv_used_blocks == 0
        assert len(recorder.reports) == steps
        assert stats.tokens_after_cancel == 0


def test_tokens_computed_in_spite_of_a_cancel_are_counted() -> None:
    gate = StepGate()
    with a_loop(gate, scheduler=ForgetfulScheduler()) as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        gate.shut()
        cancelled = loop.cancel("long", CancelCause.DELETE)
        # The step that is held was planned before the cancel; only the next one is at fault.
        gate.let_one_pass()
        assert cancelled.result()
        gate.shut()
        counted = loop.stats()
        gate.open()
        assert counted.result().tokens_after_cancel == 1


def test_cancels_of_a_tenant_that_is_gone_are_forgotten() -> None:
    with a_loop() as (loop, recorder):
        loop.submit(a_request("acme", output=10_000, request_id="long"))
        wait_for_step(recorder)
        loop.cancel("long", CancelCause.DELETE).result()
        assert sum(loop.stats().result().cancelled.values()) == 1
        loop.apply_policy(a_snapshot(a_tenant("zeta")), 7)
        eventually(lambda: recorder.policies, "a policy in force")
        assert loop.stats().result().cancelled == {}


def test_cancels_are_counted_once_by_cause_and_state() -> None:
    gate = StepGate()
    scheduler = a_scheduler(blocks=4096, block_size=16, max_num_seqs=1)
    with a_loop(gate, scheduler=scheduler) as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="running"))
        loop.submit(a_request(output=10_000, request_id="queued"))
        wait_for_step(recorder)
        queued = loop.cancel("queued", CancelCause.DISCONNECT)
        running = loop.cancel("running", CancelCause.DELETE)
        again = loop.cancel("running", CancelCause.DELETE)
        assert [queued.result(), running.result(), again.result()] == [True, True, False]
        assert loop.stats().result().cancelled == {
            CancelKey(tenant="acme", cause=CancelCause.DISCONNECT, state="waiting"): 1,
            CancelKey(tenant="acme", cause=CancelCause.DELETE, state="running"): 1,
        }


def test_a_swapped_request_is_cancelled_as_such() -> None:
    with a_displaced_request() as (loop, _, gate):
        cancelled = loop.cancel("batch", CancelCause.DELETE)
        gate.open()
        assert cancelled.result()
        stats = loop.stats().result()
        assert stats.cancelled == {
            CancelKey(tenant="batch", cause=CancelCause.DELETE, state="swapped"): 1
        }
        loop.cancel("gold", CancelCause.DELETE)
        eventually(lambda: holds_nothing(loop), "every block free")


def test_a_request_that_waited_too_long_is_dropped_in_time_though_nothing_happens() -> None:
    with a_loop(scheduler=a_scheduler(on_hold(queue_timeout_seconds=0.05))) as (loop, recorder):
        submitted = time.monotonic()
        assert loop.submit(a_request(request_id="late")).result() is None
        eventually(lambda: recorder.reports, "an expiry")
        took = time.monotonic() - submitted
        stats = loop.stats().result()
    assert [report.expired for report in recorder.reports] == [
        (Expiry("late", ExpiryCause.QUEUE_TIMEOUT),)
    ]
    assert 0.05 <= took < 5
    assert stats.cancelled == {
        CancelKey(tenant="acme", cause=CancelCause.QUEUE_TIMEOUT, state="waiting"): 1
    }


def test_a_request_that_ran_too_long_is_dropped_as_running() -> None:
    policy = a_snapshot(a_tenant(service=ServiceRule(request_timeout_seconds=0.05)))
    with a_loop(scheduler=a_scheduler(policy, blocks=4096, block_size=16)) as (loop, recorder):
        loop.submit(a_request(output=60_000, request_id="long"))
        eventually(lambda: any(r.expired for r in recorder.reports), "an expiry")
        stats = loop.stats().result()
    assert recorder.tokens_of("long") > 0
    assert stats.cancelled == {
        CancelKey(tenant="acme", cause=CancelCause.REQUEST_TIMEOUT, state="running"): 1
    }
    assert stats.tokens_after_cancel == 0


def test_a_stopped_tenants_requests_are_dropped_whatever_they_do() -> None:
    scheduler = a_scheduler(blocks=4096, block_size=16, max_num_seqs=1)
    with a_loop(scheduler=scheduler) as (loop, recorder):
        loop.submit(a_request(output=60_000, request_id="running"))
        loop.submit(a_request(output=60_000, request_id="queued"))
        wait_for_step(recorder)
        loop.apply_policy(a_snapshot(a_tenant(stop=StopPolicy.CANCEL)), 2)
        eventually(lambda: any(r.stopped for r in recorder.reports), "the tenant's end")
        stats = loop.stats().result()
    stopped = [request_id for report in recorder.reports for request_id in report.stopped]
    assert sorted(stopped) == ["queued", "running"]
    assert stats.cancelled == {
        CancelKey(tenant="acme", cause=CancelCause.TENANT_STOPPED, state=state): 1
        for state in ("running", "waiting")
    }
    assert stats.tokens_after_cancel == 0
    assert stats.scheduler.kv_used_blocks == 0


def test_a_request_finished_by_its_text_is_not_cancelled() -> None:
    with a_loop() as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        assert loop.finish("long").result()
        stats = loop.stats().result()
    assert stats.cancelled == {}
    assert stats.scheduler.tenants["acme"].finished == 1


def test_a_swapped_request_comes_back_though_nothing_else_runs() -> None:
    with a_displaced_request() as (loop, recorder, gate):
        assert recorder.tokens_of("batch") < 150
        loop.cancel("gold", CancelCause.DELETE)
        gate.open()
        eventually(lambda: "batch" in recorder.finished(), "batch's end")
        stats = loop.stats().result()
        assert recorder.tokens_of("batch") == 150
        # What the prefix cache has kept in the meantime needs no way back.
        assert 9 <= stats.scheduler.swap_in_blocks <= stats.scheduler.swap_out_blocks
        assert stats.scheduler.tenants["batch"].recomputed_tokens == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_copy_that_can_not_be_waited_for_ends_the_engine() -> None:
    gate = StepGate()
    executor = BreakingExecutor(
        a_paced_executor(gate, host_blocks=64, swap_block_seconds=600),
        lambda plan: not plan.rows,
        ExecutorError("no answer"),
    )
    with a_loop(gate, scheduler=a_one_slot_scheduler(executor), executor=executor) as (
        loop,
        recorder,
    ):
        loop.submit(a_request("batch", output=10_000, request_id="batch"))
        wait_for_step(recorder)
        loop.submit(a_request("gold", output=2, request_id="gold"))
        assert recorder.stopped.wait(timeout=10)
        assert "gold" in recorder.finished()


def test_a_step_that_breaks_with_a_copy_in_it_leaves_nothing_behind() -> None:
    gate = StepGate()
    executor = BreakingExecutor(
        a_paced_executor(gate, host_blocks=64), lambda plan: bool(plan.swap_out), ExecutorError("")
    )
    with a_loop(gate, scheduler=a_one_slot_scheduler(executor), executor=executor) as (
        loop,
        recorder,
    ):
        loop.submit(a_request("batch", output=10_000, request_id="batch"))
        wait_for_step(recorder, steps=4)
        loop.submit(a_request("gold", output=10_000, request_id="gold"))
        eventually(lambda: any(r.failed for r in recorder.reports), "a failure")
        loop.submit(a_request("gold", request_id="last"))
        for request_id in ("batch", "gold"):
            loop.cancel(request_id, CancelCause.DELETE)
        eventually(lambda: "last" in recorder.finished(), "the end of the last")
        eventually(lambda: holds_nothing(loop), "every block free")
