from dataclasses import replace

import pytest

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import RejectionCode
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import CancelCause
from tidegate_engine.executor.base import ExecutorError
from tidegate_engine.loop import EngineStoppedError
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import StepGate, a_paced_executor
from tidegate_testing.loops import BreakingExecutor, a_loop, computes, wait_for_step
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request


class SleepyScheduler(Scheduler):
    """Has nothing to do before a time, and notes when it was asked.

    Attributes:
        asked_at: Clock of every plan since the first.
    """

    def __init__(self, sleeps_seconds: float) -> None:
        super().__init__(num_blocks=64, block_size=16, limits=EngineLimits())
        self._sleeps_seconds = sleeps_seconds
        self.asked_at: list[float] = []

    def plan_step(self, now: float) -> StepPlan:
        self.asked_at.append(now)
        plan = super().plan_step(now)
        return replace(plan, wake_at=self.asked_at[0] + self._sleeps_seconds)


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


def test_the_loop_sleeps_until_the_time_that_a_plan_names() -> None:
    scheduler = SleepyScheduler(sleeps_seconds=0.2)
    with a_loop(scheduler=scheduler) as (loop, _):
        loop.stats().result()
        eventually(
            lambda: scheduler.asked_at and scheduler.asked_at[-1] >= scheduler.asked_at[0] + 0.2,
            "a plan at the time",
        )
        early = [at for at in scheduler.asked_at if at < scheduler.asked_at[0] + 0.19]
        assert len(early) == 1


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
        computed = [report for report in recorder.reports[steps:] if report.batch_size]
        assert len(computed) == 1


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
    executor = BreakingExecutor(
        a_paced_executor(gate), computes("bad"), ExecutorError("out of memory")
    )
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
    executor = BreakingExecutor(a_paced_executor(gate), computes("bad"), ZeroDivisionError())
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
