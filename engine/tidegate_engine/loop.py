"""The engine's own thread: takes commands between steps, plans, executes, commits.

The thread owns scheduler and executor; nobody else touches them. Commands come through a queue and
are carried out at step boundaries, which is what makes "from the next step on" true for a cancel
or a policy. What a step gave is told to a listener once per step, however many tokens it holds.
"""

import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    Request,
    TokenOutput,
)
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.standings import StandingBook
from tidegate_engine.core.step_scheduler import StepScheduler
from tidegate_engine.events import (
    CancelCause,
    CancelKey,
    EngineListener,
    EngineStats,
    PolicyApplied,
    Reading,
    Refused,
    StepReport,
)
from tidegate_engine.executor.base import Executor, ExecutorError
from tidegate_policies.snapshot import PolicySnapshot


class EngineStoppedError(RuntimeError):
    """The engine's thread has ended and takes no commands."""


T = TypeVar("T")


class _Command(Generic[T]):
    """Something to do in the engine's thread, and where its answer goes."""

    def __init__(self, act: Callable[[], T], answer: "Future[T]") -> None:
        self._act = act
        self._answer = answer

    def carry_out(self) -> None:
        if not self._answer.set_running_or_notify_cancel():
            return
        try:
            answer = self._act()
        except BaseException as error:
            self._answer.set_exception(error)
            raise
        self._answer.set_result(answer)

    def refuse(self) -> None:
        if self._answer.set_running_or_notify_cancel():
            self._answer.set_exception(EngineStoppedError("the engine has stopped"))


class _Times(NamedTuple):
    """Clock readings of one step."""

    began: float
    planned: float
    executed: float


@dataclass(slots=True, kw_only=True)
class _Live:
    tenant: str
    phase: Phase = Phase.WAITING


class EngineLoop:
    """Drives one scheduler with one executor in a thread of its own."""

    def __init__(
        self,
        *,
        scheduler: StepScheduler,
        executor: Executor,
        listener: EngineListener,
        clock: Callable[[], float],
    ) -> None:
        """Prepare; `start` begins.

        Args:
            scheduler: Owned from here on.
            executor: Owned from here on.
            listener: Told of every step.
            clock: Monotonic, in seconds; only differences matter. Waits are measured on it, too.
        """
        self._scheduler = scheduler
        self._executor = executor
        self._listener = listener
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        self._is_stopping = False
        self._live: dict[str, _Live] = {}
        self._cancelled: Counter[CancelKey] = Counter()
        self._tokens_after_cancel = 0
        self._refused: list[Refused] = []
        self._revision = scheduler.revision
        self._policy_handed_at: dict[int, float] = {}
        self._last_stats = self._count()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def last_stats(self) -> EngineStats:
        """The newest answer to `stats`, for those who can't wait for a long step to end."""
        return self._last_stats

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in flight, and wait for it. Requests that are left get no answer."""
        if self._thread.is_alive():
            self._ask(self._begin_stop)
            self._thread.join()

    def submit(self, request: Request) -> "Future[Rejection | None]":
        """Queue a request at the next step boundary; the answer is None when it was accepted."""
        return self._ask(lambda: self._submit(request))

    def cancel(self, request_id: str, cause: CancelCause) -> "Future[bool]":
        """Take a request out: no step planned from the next boundary on contains it.

        Returns:
            Whether it was alive then.
        """
        return self._ask(lambda: self._cancel(request_id, cause))

    def finish(self, request_id: str) -> "Future[bool]":
        """End a request whose text is complete: it counts as finished, not as cancelled."""
        return self._ask(lambda: self._finish(request_id))

    def apply_policy(self, snapshot: PolicySnapshot, revision: int) -> "Future[None]":
        """Put a policy in force with the next plan; `policy_applied` tells when that is so."""
        handed_at = self._clock()
        return self._ask(lambda: self._apply_policy(snapshot, revision, handed_at))

    def note_elsewhere(self, service: Mapping[str, float], active: Iterable[str]) -> "Future[None]":
        """Count at the next step boundary what other engines of the pool gave.

        Args:
            service: By tenant, since the last call, in cost units.
            active: Tenants with work in another engine.
        """
        return self._ask(lambda: self._scheduler.note_elsewhere(service, active))

    def stats(self) -> "Future[EngineStats]":
        """Count at the next step boundary."""
        return self._ask(self._count)

    def look(self, at: Callable[[StandingBook, float], T]) -> "Future[T]":
        """Answer a question about where requests stand, and what time it is, between two steps."""
        return self._ask(lambda: at(self._scheduler.standings, self._clock()))

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            next_plan_at = math.inf
            while True:
                self._take_commands(until=next_plan_at)
                if self._is_stopping:
                    break
                next_plan_at = self._step()
        finally:
            self._end()

    def _take_commands(self, *, until: float) -> None:
        """Carry out what has come; with nothing to plan before `until`, wait for something."""
        seconds = until - self._clock()
        if seconds > 0:
            try:
                command = self._commands.get(timeout=min(seconds, threading.TIMEOUT_MAX))
            except queue.Empty:
                return
            command.carry_out()
        while not self._commands.empty():
            self._commands.get().carry_out()

    def _step(self) -> float:
        """Plan, execute, commit.

        Returns:
            When to plan again, unless a command comes before; infinity = not before a command.
        """
        began = self._clock()
        plan = self._scheduler.plan_step(began)
        planned = self._clock()
        self._note_policy(plan, planned)
        self._note_drops(plan)
        self._note_moves(plan)
        if plan.is_executable:
            self._execute(plan, began, planned)
            return began
        has_drops = bool(plan.ended or plan.expired or plan.stopped)
        if has_drops or plan.decisions or self._refused:
            self._tell(self._report(plan, began, planned))
        if has_drops:
            return began  # what they leave behind may be what others wait for
        return math.inf if plan.wake_at is None else plan.wake_at

    def _execute(self, plan: StepPlan, began: float, planned: float) -> None:
        try:
            result = self._executor.execute(plan)
        except ExecutorError as error:
            self._fail(plan, error, began)
        else:
            self._commit(plan, result, _Times(began, planned, self._clock()))

    def _commit(self, plan: StepPlan, result: StepResult, times: "_Times") -> None:
        # Cancels are carried out between steps: who isn't live now wasn't when this was planned.
        # Padding is computed for nobody from the start.
        self._tokens_after_cancel += sum(
            len(row.token_ids)
            for row in plan.rows
            if row.request_id not in self._live and not row.is_padding
        )
        outputs = self._scheduler.commit_step(plan, result, times.executed)
        failed = tuple(request_id for request_id in result.failures if request_id in self._live)
        for request_id in failed:
            self._book_drop(request_id, CancelCause.ENGINE_FAILED)
        committed = self._clock()
        reading = tuple(Reading(row.request_id, row.end) for row in plan.rows if not row.is_decode)
        decodes = len(plan.rows) - len(reading)
        report = self._report(plan, times.began, committed)
        self._tell(
            replace(
                report,
                step_seconds=times.executed - times.planned,
                scheduler_seconds=times.planned - times.began + committed - times.executed,
                batch_size=len(plan.rows),
                prefill_tokens=sum(len(row.token_ids) for row in plan.rows) - decodes,
                decode_tokens=decodes,
                reading=reading,
                outputs=report.outputs + outputs,
                failed=failed,
                failure=result.failures[failed[0]] if failed else "",
            )
        )

    def _fail(self, plan: StepPlan, error: ExecutorError, began: float) -> None:
        """Drop the requests whose step broke; the others go on.

        Raises:
            ExecutorError: There was nobody to drop, so that it would only break again.
        """
        now = self._clock()
        failed = self._scheduler.abandon_step(plan, now)
        if not failed:
            raise error
        for request_id in failed:
            self._book_drop(request_id, CancelCause.ENGINE_FAILED)
        self._tell(replace(self._report(plan, began, now), failed=failed, failure=str(error)))

    def _report(self, plan: StepPlan, began: float, committed: float) -> StepReport:
        """Tell what planning alone has done."""
        refused, self._refused = tuple(self._refused), []
        return StepReport(
            step=plan.step,
            revision=plan.revision,
            watermark=plan.watermark,
            planned_at=began,
            committed_at=committed,
            decisions=plan.decisions,
            admitted=plan.admitted,
            cached=plan.cached,
            outputs=tuple(TokenOutput(i, None, FinishReason.LENGTH) for i in plan.ended),
            refused=refused,
            expired=plan.expired,
            stopped=plan.stopped,
        )

    def _tell(self, report: StepReport) -> None:
        for output in report.outputs:
            if output.finish_reason is not None:
                self._live.pop(output.request_id, None)
        self._listener.step_done(report)

    def _note_policy(self, plan: StepPlan, now: float) -> None:
        if plan.revision == self._revision:
            return
        self._revision = plan.revision
        handed_at = self._policy_handed_at.pop(plan.revision, now)
        # Those that were overtaken in the scheduler's mailbox never take effect.
        self._policy_handed_at.clear()
        # Without rows the number is that of the last step: the next one is the first under it.
        step = plan.step if plan.rows else plan.step + 1
        self._listener.policy_applied(
            PolicyApplied(revision=plan.revision, step=step, at=now, seconds=now - handed_at)
        )

    def _note_drops(self, plan: StepPlan) -> None:
        for expiry in plan.expired:
            self._book_drop(expiry.request_id, CancelCause(expiry.cause.value))
        for request_id in plan.stopped:
            self._book_drop(request_id, CancelCause.TENANT_STOPPED)

    def _note_moves(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self._live[request_id].phase = Phase.WAITING
        for copy in plan.swap_out:
            self._live[copy.request_id].phase = Phase.SWAPPED
        for request_id in plan.admitted:
            self._live[request_id].phase = Phase.RUNNING

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
        while not self._commands.empty():
            self._commands.get().refuse()
        self._listener.engine_stopped()

    # -- commands, carried out in the thread -----------------------------------------------------

    def _ask(self, act: "Callable[[], T]") -> "Future[T]":
        answer: Future[T] = Future()
        command = _Command(act, answer)
        # Under the lock, so that no command slips in behind the last look at the queue.
        with self._lock:
            if not self._has_ended:
                self._commands.put(command)
                return answer
        command.refuse()
        return answer

    def _begin_stop(self) -> None:
        self._is_stopping = True

    def _submit(self, request: Request) -> Rejection | None:
        now = self._clock()
        rejection = self._scheduler.submit(request, now)
        if rejection is None:
            self._live[request.request_id] = _Live(tenant=request.tenant)
        else:
            code = rejection.code.value
            self._refused.append(Refused(request.request_id, request.tenant, code, now))
        return rejection

    def _cancel(self, request_id: str, cause: CancelCause) -> bool:
        phase = self._scheduler.cancel(request_id, self._clock())
        if phase is None:
            return False
        self._book(self._live.pop(request_id).tenant, cause, phase)
        return True

    def _book_drop(self, request_id: str, cause: CancelCause) -> None:
        """Book a request that the scheduler has dropped by itself."""
        live = self._live.pop(request_id)
        self._book(live.tenant, cause, live.phase)

    def _book(self, tenant: str, cause: CancelCause, phase: Phase) -> None:
        self._cancelled[CancelKey(tenant=tenant, cause=cause, state=phase.value)] += 1

    def _finish(self, request_id: str) -> bool:
        self._live.pop(request_id, None)
        return self._scheduler.finish(request_id, self._clock())

    def _apply_policy(self, snapshot: PolicySnapshot, revision: int, handed_at: float) -> None:
        self._policy_handed_at[revision] = handed_at
        self._scheduler.apply_policy(snapshot, revision, at=handed_at)

    def _count(self) -> EngineStats:
        stats = self._scheduler.stats()
        # Tenants come and go: those that the scheduler has forgotten are forgotten here, too.
        for key in [key for key in self._cancelled if key.tenant not in stats.tenants]:
            del self._cancelled[key]
        self._last_stats = EngineStats(
            scheduler=stats,
            cancelled=dict(self._cancelled),
            tokens_after_cancel=self._tokens_after_cancel,
            step_costs=self._scheduler.step_costs,
        )
        return self._last_stats
