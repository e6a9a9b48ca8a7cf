"""Drives a scheduler and an executor through arrivals on a virtual clock.

The loop is the engine's: what has come is handed over between two steps, then a step is planned,
executed and committed. Time passes in the executor alone and, while nothing can run, up to the next
arrival or to when the scheduler asked to be woken. A request that comes during a step is submitted
after it, but its waiting counts from when it came.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import (
    FinishReason,
    Rejection,
    Request,
    TokenOutput,
)
from tidegate_engine.core.step_scheduler import StepScheduler
from tidegate_engine.executor.base import Executor
from tidegate_engine.executor.clock import Clock
from tidegate_engine.replay.log import Outcome, ReplayLog, RequestTrace, StepTrace

_LEAST_WAIT_SECONDS = 1e-6
"""A wait moves the clock by so much at least, so that rounding can't make it stand still."""


class Arrival(NamedTuple):
    """A request and when it comes, on the replay's clock."""

    at: float
    request: Request


class ReplayStalledError(RuntimeError):
    """A scheduler can't go on: it wants to be woken in the past, or has work and plans nothing.

    Attributes:
        now: The time at which it stalled.
    """

    def __init__(self, problem: str, *, now: float) -> None:
        super().__init__(f"at {now:g} s: {problem}")
        self.now = now


class Replay:
    """One scheduler and one executor, driven step by step or through a whole trace."""

    def __init__(self, *, scheduler: StepScheduler, executor: Executor, clock: Clock) -> None:
        """Start with an empty log.

        Args:
            scheduler: With a policy in force, or one in its mailbox.
            executor: Moves `clock` by what a step takes; another one computes in no time.
            clock: Shared with `executor`; a virtual one, or waiting takes real time.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.log = ReplayLog()

    def submit(self, request: Request) -> Rejection | None:
        """Hand a request over at this step boundary; its id was not used before in this replay."""
        now = self.clock.now()
        trace = RequestTrace(
            request_id=request.request_id,
            tenant=request.tenant,
            prompt_tokens=len(request.prompt_ids),
            arrived_at=request.came_at(now),
        )
        rejection = self.scheduler.submit(request, now)
        self.log.requests[trace.request_id] = trace
        if rejection is not None:
            trace.rejection = rejection
            self._end(trace.request_id, Outcome.REJECTED, now)
        return rejection

    def cancel(self, request_id: str) -> bool:
        """Cancel a request at this step boundary; returns whether it was alive."""
        now = self.clock.now()
        was_alive = self.scheduler.cancel(request_id, now) is not None
        if was_alive:
            self._end(request_id, Outcome.CANCELLED, now)
        return was_alive

    def step(self) -> StepPlan:
        """Plan and, where there is anything to execute, execute and commit one step."""
        began = self.clock.now()
        plan = self.scheduler.plan_step(began)
        self._note_moves(plan, began)
        if plan.is_executable:
            result = self.executor.execute(plan)
            done = self.clock.now()
            self.log.steps.append(StepTrace.of(plan, began_at=began, seconds=done - began))
            self._note_outputs(self.scheduler.commit_step(plan, result, done), done)
        return plan

    def run(
        self,
        arrivals: Iterable[Arrival] = (),
        *,
        until: float | None = None,
        at_step: Callable[[StepPlan], None] | None = None,
    ) -> ReplayLog:
        """Go through the arrivals and on until nothing can happen any more.

        Args:
            arrivals: In order of time.
            until: Plan no step from this time on, and let it come when there is nothing to do;
                None = no limit. A step that has begun ends; who has not come by then never comes.
            at_step: Called with every executed plan, once it is committed; it may submit, cancel or
                give the scheduler a policy.

        Raises:
            ReplayStalledError: The scheduler wants to be woken in the past.
        """
        upcoming = iter(arrivals)
        following = next(upcoming, None)
        while until is None or self.clock.now() < until:
            while following is not None and following.at <= self.clock.now():
                self.submit(replace(following.request, arrived_at=following.at))
                following = next(upcoming, None)
            plan = self.step()
            if plan.is_executable:
                if at_step is not None:
                    at_step(plan)
                continue
            next_arrival = None if following is None else following.at
            if not self._wait(plan.wake_at, next_arrival, until):
                break
        return self.log

    def run_until(self, time: float) -> None:
        """Plan and execute steps up to `time`; with nothing to do, let it come."""
        self.run(until=time)

    def drain(self, *, at_most_steps: int = 100_000) -> None:
        """Go on until no request is left.

        Raises:
            ReplayStalledError: Requests are left after so many steps, or nothing can run any more.
        """
        for _ in range(at_most_steps):
            if not self.scheduler.has_work:
                return
            plan = self.step()
            # A plan without rows may have ended the last request.
            is_over = plan.is_executable or not self.scheduler.has_work
            if not is_over and not self._wait(plan.wake_at):
                raise self._stalled("requests are left and nothing can run")
        if self.scheduler.has_work:
            raise self._stalled(f"requests are left after {at_most_steps} steps")

    def _wait(self, wake_at: float | None, *others: float | None) -> bool:
        """Let the next moment come at which anything can happen.

        Returns:
            Whether there is one.
        """
        now = self.clock.now()
        if wake_at is not None and wake_at < now:
            raise self._stalled(f"the scheduler wants to be woken at {wake_at:g} s")
        moments = [moment for moment in (wake_at, *others) if moment is not None]
        if not moments:
            return False
        self.clock.advance(max(min(moments) - now, _LEAST_WAIT_SECONDS))
        return True

    def _note_moves(self, plan: StepPlan, now: float) -> None:
        for request_id in plan.preempted:
            self.log.requests[request_id].preemptions += 1
        for request_id in plan.admitted:
            trace = self.log.requests[request_id]
            if trace.admitted_at is None:
                trace.admitted_at = now
        for request_id in plan.ended:
            self._end(request_id, Outcome.LENGTH, now)
        for expiry in plan.expired:
            self._end(expiry.request_id, Outcome(expiry.cause), now)
        for request_id in plan.stopped:
            self._end(request_id, Outcome.TENANT_STOPPED, now)

    def _note_outputs(self, outputs: Iterable[TokenOutput], now: float) -> None:
        for output in outputs:
            trace = self.log.requests[output.request_id]
            if output.token is not None:
                trace.token_ids.append(output.token.token_id)
                trace.token_times.append(now)
            if output.finish_reason is not None:
                self._end(trace.request_id, _outcome(output.finish_reason), now)

    def _end(self, request_id: str, outcome: Outcome, now: float) -> None:
        trace = self.log.requests[request_id]
        trace.outcome, trace.ended_at = outcome, now

    def _stalled(self, problem: str) -> ReplayStalledError:
        return ReplayStalledError(f"{problem}: {self.scheduler.stats()}", now=self.clock.now())


def _outcome(reason: FinishReason) -> Outcome:
    return Outcome(reason.value)
