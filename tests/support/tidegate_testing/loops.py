"""Engine loops that run in their thread, and what they tell."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import FinishReason
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import PolicyApplied, StepReport
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.loop import EngineLoop
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import StepGate, a_paced_executor
from tidegate_testing.scheduling import a_scheduler


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


def computes(request_id: str) -> Callable[[StepPlan], bool]:
    return lambda plan: any(row.request_id == request_id for row in plan.rows)


class BreakingExecutor:
    """Breaks in the steps of certain plans."""

    def __init__(
        self, inner: Executor, breaks: Callable[[StepPlan], bool], error: Exception
    ) -> None:
        self._inner = inner
        self._breaks = breaks
        self._error = error

    @property
    def capacity(self) -> Capacity:
        return self._inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        if self._breaks(plan):
            raise self._error
        return self._inner.execute(plan)

    def measure(self) -> ExecutorCosts:
        return self._inner.measure()


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


def wait_for_step(recorder: Recorder, *, steps: int = 1) -> None:
    """Wait until more steps have ended."""
    seen = len(recorder.reports)
    eventually(lambda: len(recorder.reports) >= seen + steps, "another step")
