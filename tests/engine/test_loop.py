import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import FinishReason, RejectionCode
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import CancelCause, CancelKey, PolicyApplied, StepReport
from tidegate_engine.executor.base import Capacity, Executor, ExecutorError
from tidegate_engine.loop import EngineLoop, EngineStoppedError
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import StepGate, a_paced_executor
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request, a_scheduler


@dataclass
class Recorder:
    """Keeps what the engine's thread tells."""

    reports: list[StepReport] = field(default_factory=list)
    policies: list[PolicyApplied] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def step_done(self, report: StepReport) -> None:
        self.reports.append(report)

    def policy_applied(self, applied: PolicyApplied) -> None:
        self.policies.append(applied)

    def engine_stopped(self) -> None:
        self.stopped.set()

    def finished(self) -> dict[str, FinishReason]:
        outputs = [output for report in self.reports for output in report.outputs]
        return {o.request_id: o.finish_reason for o in outputs if o.finish_reason}

    def tokens_of(self, request_id: str) -> int:
        outputs = [output for report in self.reports for output in report.outputs]
        return sum(1 for o in outputs if o.request_id == request_id and o.token)


class BreakingExecutor:
    """Breaks in the steps that compute a given request."""

    def __init__(self, inner: Executor, request_id: str, error: Exception) -> None:
        self._inner = inner
        self._request_id = request_id
        self._error = error

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        if any(row.request_id == self._request_id for row in plan.rows):
            raise self._error
        return self._inner.execute(plan)


class ForgetfulScheduler(Scheduler):
    """Says that it has cancelled a request, and leaves it in the batch."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4096, block_size=16, limits=EngineLimits())
        self.apply_policy(a_snapshot(), 1)
        self.plan_step(0.0)

    def cancel(self, request_id: str, now: float) -> bool:  # noqa: ARG002
        return True


@contextmanager
def a_loop(
    gate: StepGate | None = None,
    *,
    scheduler: Scheduler | None = None,
    executor: Executor | None = None,
) -> Iterator[tuple[EngineLoop, Recorder]]:
    recorder = Recorder()
    gate = gate or StepGate()
    loop = EngineLoop(
        scheduler=scheduler or a_scheduler(blocks=4096, block_size=16),
        executor=executor or a_paced_executor(gate),
        listener=recorder,
        clock=time.monotonic,
    )
    loop.start()
    try:
        yield loop, recorder
    finally:
        gate.open()
        loop.stop()


def wait_for_step(recorder: Recorder) -> None:
    """Wait until one more step has ended."""
    seen = len(recorder.reports)
    eventually(lambda: len(recorder.reports) > seen, "another step")


def test_requests_are_computed_to_their_end() -> None:
    with a_loop() as (loop, recorder):
        for number in range(3):
            request = a_request(output=number + 1, request_id=f"r{number}")
            assert loop.submit(request).result() is None
        eventually(lambda: len(recorder.finished()) == 3, "the end of all")
    assert [recorder.tokens_of(f"r{number}") for number in range(3)] == [1, 2, 3]


def test_a_refusal_is_the_answer_to_a_submission() -> None:
    with a_loop() as (loop, _):
        rejection = loop.submit(a_request(tenant="nobody")).result()
    assert rejection is not None
    assert rejection.code is RejectionCode.UNKNOWN_TENANT


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


def test_a_request_finished_by_its_text_is_not_cancelled() -> None:
    with a_loop() as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        assert loop.finish("long").result()
        stats = loop.stats().result()
    assert stats.cancelled == {}
    assert stats.scheduler.tenants["acme"].finished == 1


def test_commands_given_during_a_step_are_carried_out_at_its_end() -> None:
    gate = StepGate()
    with a_loop(gate) as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        gate.shut()
        steps = len(recorder.reports)
        cancelled = loop.cancel("long", CancelCause.DELETE)
        assert not cancelled.done()
        gate.open()
        assert cancelled.result()
        assert len(recorder.reports) == steps + 1


def test_a_policy_in_force_is_told_with_its_first_step() -> None:
    with a_loop() as (loop, recorder):
        loop.apply_policy(a_snapshot(a_tenant(), a_tenant("zeta")), 7).result()
        eventually(lambda: recorder.policies, "a policy in force")
        loop.submit(a_request("zeta", output=1))
        eventually(recorder.finished, "the end")
    [applied] = recorder.policies
    assert applied.revision == 7
    assert applied.step == recorder.reports[0].step
    assert applied.seconds >= 0


def test_of_two_policies_before_a_step_only_the_newer_takes_effect() -> None:
    gate = StepGate()
    with a_loop(gate) as (loop, recorder):
        loop.submit(a_request(output=10_000, request_id="long"))
        wait_for_step(recorder)
        gate.shut()
        loop.apply_policy(a_snapshot(), 2)
        loop.apply_policy(a_snapshot(), 3)
        gate.open()
        eventually(lambda: recorder.policies, "a policy in force")
        loop.stats().result()
    assert [applied.revision for applied in recorder.policies] == [3]


def test_a_broken_step_fails_its_own_requests_and_the_engine_goes_on() -> None:
    gate = StepGate()
    executor = BreakingExecutor(a_paced_executor(gate), "bad", ExecutorError("out of memory"))
    with a_loop(gate, executor=executor) as (loop, recorder):
        loop.submit(a_request(request_id="bad")).result()
        eventually(lambda: any(r.failed for r in recorder.reports), "a failure")
        loop.submit(a_request(request_id="good")).result()
        eventually(recorder.finished, "the end")
        stats = loop.stats().result()
    [failure] = [report for report in recorder.reports if report.failed]
    assert (failure.failed, failure.failure) == (("bad",), "out of memory")
    assert stats.scheduler.kv_used_blocks == 0
    assert sum(stats.cancelled.values()) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_ends_the_thread_and_is_told() -> None:
    gate = StepGate()
    executor = BreakingExecutor(a_paced_executor(gate), "bad", ZeroDivisionError())
    with a_loop(gate, executor=executor) as (loop, recorder):
        loop.submit(a_request(request_id="bad"))
        assert recorder.stopped.wait(timeout=10)
        with pytest.raises(EngineStoppedError):
            loop.stats().result()
        eventually(lambda: not loop.is_alive, "the end of the thread")


def test_commands_after_the_end_are_refused() -> None:
    with a_loop() as (loop, recorder):
        pass
    assert recorder.stopped.is_set()
    with pytest.raises(EngineStoppedError):
        loop.submit(a_request()).result()


def test_a_step_is_measured() -> None:
    with a_loop(executor=a_paced_executor(StepGate(), step_seconds=0.001)) as (loop, recorder):
        loop.submit(a_request(prompt=5, output=2))
        eventually(recorder.finished, "the end")
    prefill, decode = recorder.reports
    assert (prefill.prefill_tokens, prefill.decode_tokens, prefill.batch_size) == (5, 0, 1)
    assert (decode.prefill_tokens, decode.decode_tokens, decode.batch_size) == (0, 1, 1)
    assert prefill.step_seconds >= 0.001
    assert 0 < prefill.scheduler_seconds < prefill.committed_at - prefill.planned_at
    assert len(prefill.admitted) == 1
    assert decode.admitted == ()


def test_a_prompt_of_one_token_is_no_decode() -> None:
    with a_loop() as (loop, recorder):
        loop.submit(a_request(prompt=1, output=1))
        eventually(recorder.finished, "the end")
    [prefill] = recorder.reports
    assert (prefill.prefill_tokens, prefill.decode_tokens) == (1, 0)
