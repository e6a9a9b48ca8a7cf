"""All running generations: who waits for which request's tokens, and what ends them early.

A generation is one HTTP request with its choices, each of which is one request of the scheduler.
All of this lives in the event loop; the engine's thread only knows the requests.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from tidegate_engine.core.plan import ExpiryCause
from tidegate_engine.core.request import Rejection, Request, TokenOutput
from tidegate_engine.events import CancelCause, StepReport
from tidegate_engine.loop import EngineLoop, EngineStoppedError
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.server.errors import (
    ApiError,
    EngineDrainingError,
    EngineFailedError,
    QueueTimeoutError,
    RequestCancelledError,
    RequestTimeoutError,
    SlowReaderError,
    TenantStoppedError,
    from_rejection,
)
from tidegate_engine.server.generation import Choice, Generation
from tidegate_engine.server.request_id import is_named
from tidegate_engine.server.request_trace import RequestTrace
from tidegate_engine.service_levels import ServiceLevels

STALLED_SECONDS = 2.0
"""A reader who takes nothing for so long doesn't keep a draining engine."""

_EXPIRY_ERRORS: dict[ExpiryCause, Callable[[], ApiError]] = {
    ExpiryCause.QUEUE_TIMEOUT: QueueTimeoutError,
    ExpiryCause.REQUEST_TIMEOUT: RequestTimeoutError,
}


class Generations:
    """All running generations of the engine.

    Attributes:
        is_leaving: Routers are to send nothing more; what they send all the same is served until
            the engine drains.
    """

    def __init__(
        self, *, engine: EngineLoop, metrics: EngineMetrics, levels: ServiceLevels
    ) -> None:
        """Start with none.

        Args:
            engine: Gets the requests.
            metrics: Gets the latencies.
            levels: Gets them, too, and how requests end.
        """
        self._engine = engine
        self._metrics = metrics
        self._levels = levels
        self._by_id: dict[str, Generation] = {}
        self._by_request: dict[str, Choice] = {}
        self._leaving: dict[str, Choice] = {}
        self._is_draining = False
        self._is_told_to_drain = False
        self.is_leaving = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._is_draining or self._is_told_to_drain

    @property
    def running_ids(self) -> tuple[str, ...]:
        """Ids of the generations that haven't ended."""
        return tuple(self._by_id)

    def request_ids(self, name: str) -> list[str]:
        """Return the ids of the running requests that `name` means, as `is_named` has it."""
        return [request_id for request_id in self._by_request if is_named(request_id, name)]

    def begin(self, generation: Generation, requests: Sequence[Request]) -> None:
        """Submit all choices of a generation; from here on its outputs come.

        Should the engine refuse one of them, none is left in it and the reader gets the refusal.

        Raises:
            EngineDrainingError: No new work is taken.
        """
        if self.is_draining:
            raise EngineDrainingError
        self._by_id[generation.generation_id] = generation
        self._idle.clear()
        generation.num_unanswered = len(requests)
        event_loop = asyncio.get_running_loop()
        for index, request in enumerate(requests):
            choice = Choice(index, request.request_id, generation)
            num_tokens = len(request.prompt_ids)
            self._metrics.observe_length("prompt", num_tokens, at=generation.arrived_at)
            # Known before it is submitted: its first token may come before our answer does.
            self._by_request[request.request_id] = generation.live[index] = choice
        if (trace := generation.trace) is not None:
            trace.follower.begin(trace, (request.request_id for request in requests))
        for request in requests:
            self._engine.submit(request).add_done_callback(
                # In the engine's thread, and so in order with what its steps tell.
                lambda answer: event_loop.call_soon_threadsafe(
                    self._take_answer, generation, answer
                )
            )

    def finish_choice(self, generation: Generation, index: int) -> None:
        """End a choice whose text is complete: it contains a stop string."""
        choice = generation.live.get(index)
        if choice is not None:
            self._engine.finish(choice.request_id)
            self._close(choice, ended_at=choice.last_token_at, cause=None)

    def end(
        self, generation: Generation, *, cause: CancelCause, on_left: Callable[[], None]
    ) -> None:
        """Forget a generation; what still runs of it is cancelled.

        Args:
            generation: Whose reader has read enough.
            cause: Why what still runs is cancelled.
            on_left: Called when nothing is computed for it any more: its counts are final then.
        """
        for choice in list(generation.live.values()):
            self._take_out(choice, cause)
        if generation.num_leaving:
            generation.on_left = on_left
        else:
            on_left()
        has_ended = self._by_id.pop(generation.generation_id, None) is not None
        if not self._by_id:
            self._idle.set()
        if has_ended and (trace := generation.trace) is not None:
            self._end_trace(trace, generation)

    async def cancel(self, generation_id: str, *, tenant: str) -> bool:
        """Cancel a generation of `tenant` by its id; it has left the engine on return.

        Returns:
            Whether there was one that hadn't ended; another tenant's is like none.
        """
        generation = self._by_id.get(generation_id)
        if generation is None or generation.tenant != tenant:
            return False
        # Until the engine has said whether it came in time, the reader gets no end.
        with generation.held():
            answers = await asyncio.gather(
                *(
                    asyncio.wrap_future(self._engine.cancel(choice.request_id, CancelCause.DELETE))
                    for choice in generation.live.values()
                ),
                return_exceptions=True,
            )
            if True not in answers:
                return False
            self._abort(generation, RequestCancelledError(), CancelCause.DELETE)
        return True

    def begin_drain(self) -> None:
        """Refuse new work from now on; what runs goes on."""
        self._is_draining = True

    def follow_drain(self, *, is_told: bool) -> None:
        """Refuse new work while the pool's policy says so; `begin_drain` is for good."""
        self._is_told_to_drain = is_told

    async def drain(self, grace_seconds: float) -> None:
        """Refuse new work and wait until what runs has ended and was read.

        After the grace what still runs is ended; who has yet to read an answer that is complete
        may go on with that. Once all are complete, readers who take nothing are waited for no more.
        """
        self.begin_drain()
        try:
            async with asyncio.timeout(grace_seconds):
                await self._all_read()
        except TimeoutError:
            for generation in list(self._by_id.values()):
                self._abort(generation, EngineDrainingError(), CancelCause.DRAIN)

    async def _all_read(self) -> None:
        """Return when nothing runs, and nobody reads."""
        progress: list[tuple[str, int]] | None = None
        while not self._idle.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED_SECONDS):
                    await self._idle.wait()
            before, progress = (
                progress,
                [(g.generation_id, g.num_read) for g in self._by_id.values()],
            )
            if progress == before and not any(g.live for g in self._by_id.values()):
                return

    # -- from the engine -------------------------------------------------------------------------

    def take_step(self, report: StepReport) -> None:
        """Pass a step's tokens, or what ended a request before its end, to those who wait."""
        for request_id in report.admitted:
            if (choice := self._by_request.get(request_id)) is not None:
                self._note_admission(choice, report.planned_at)
        self._count_prompts(report)
        for output in report.outputs:
            if (choice := self._by_request.get(output.request_id)) is not None:
                self._take(choice, output, report.committed_at)
            elif (choice := self._leaving.get(output.request_id)) is not None:
                choice.generation.count(choice.index, output)
        for request_id, cause in report.expired:
            self._abort_of(request_id, _EXPIRY_ERRORS[cause](), CancelCause(cause.value))
        for request_id in report.stopped:
            self._abort_of(request_id, TenantStoppedError(), CancelCause.TENANT_STOPPED)
        for request_id in report.failed:
            error = EngineFailedError(f"A step failed: {report.failure}")
            self._abort_of(request_id, error, CancelCause.ENGINE_FAILED)

    def _count_prompts(self, report: StepReport) -> None:
        """Note what was found of prompts, and what was computed: of those that leave, too."""
        for request_id, num_tokens in report.cached:
            if (choice := self._counted(request_id)) is not None:
                choice.generation.cached_tokens[choice.index] = num_tokens
        for request_id, end in report.reading:
            if (choice := self._counted(request_id)) is not None:
                read = choice.generation.read_tokens
                read[choice.index] = max(end, read.get(choice.index, 0))

    def _counted(self, request_id: str) -> Choice | None:
        return self._by_request.get(request_id) or self._leaving.get(request_id)

    def engine_stopped(self) -> None:
        """End everything: no more tokens will come."""
        for generation in list(self._by_id.values()):
            error = EngineFailedError("The engine has stopped.")
            self._abort(generation, error, CancelCause.ENGINE_FAILED)

    def _take_answer(self, generation: Generation, answer: "Future[Rejection | None]") -> None:
        try:
            rejection = answer.result()
        except EngineStoppedError as error:
            failure = EngineFailedError(f"{error}")
            self._abort(generation, failure, CancelCause.ENGINE_FAILED)
        else:
            if rejection is not None:
                self._abort(generation, from_rejection(rejection), CancelCause.SIBLING_REFUSED)
        generation.answered()

    def _take(self, choice: Choice, output: TokenOutput, now: float) -> None:
        generation = choice.generation
        generation.count(choice.index, output)
        if output.token is not None:
            self._note_token(choice, now)
        if output.finish_reason is not None:
            self._close(choice, ended_at=now, cause=None)
        if generation.is_full and generation.live:
            error = SlowReaderError(generation.max_unread_events)
            self._abort(generation, error, CancelCause.SLOW_READER)
        else:
            generation.put(choice.index, output)

    def _abort_of(self, request_id: str, error: ApiError, cause: CancelCause) -> None:
        """Stop the whole generation of a request that the engine has dropped."""
        if (choice := self._by_request.get(request_id)) is not None:
            self._abort(choice.generation, error, cause)

    def _abort(self, generation: Generation, error: ApiError, cause: CancelCause) -> None:
        """Stop a generation that still runs; who reads it gets `error` and then calls `end`."""
        if not generation.live:
            return
        for choice in list(generation.live.values()):
            self._take_out(choice, cause)
        generation.fail(error)

    def _take_out(self, choice: Choice, cause: CancelCause) -> None:
        """Cancel a choice; what the step in flight computes for it is counted."""
        event_loop = asyncio.get_running_loop()
        self._leaving[choice.request_id] = choice
        choice.generation.num_leaving += 1
        self._engine.cancel(choice.request_id, cause).add_done_callback(
            # In the engine's thread, and so behind what its steps have told.
            lambda _: event_loop.call_soon_threadsafe(self._has_left, choice)
        )
        self._close(choice, ended_at=None, cause=cause)

    def _has_left(self, choice: Choice) -> None:
        del self._leaving[choice.request_id]
        generation = choice.generation
        generation.num_leaving -= 1
        if not generation.num_leaving and generation.on_left is not None:
            generation.on_left()

    def _end_trace(self, trace: RequestTrace, generation: Generation) -> None:
        # Of a prompt's choices the first tells what was cached: others find what it has computed.
        trace.cached_tokens = sum(
            num_tokens
            for index, num_tokens in generation.cached_tokens.items()
            if index % trace.choices_per_prompt == 0
        )
        trace.output_tokens = sum(generation.num_outputs.values())
        if generation.error is not None:
            trace.fail(generation.error)
        trace.follower.end(trace)

    def _close(self, choice: Choice, *, ended_at: float | None, cause: CancelCause | None) -> None:
        """Forget a choice that is complete, or was taken out for a cause."""
        del self._by_request[choice.request_id]
        del choice.generation.live[choice.index]
        generation = choice.generation
        if (trace := generation.trace) is not None:
            trace.follower.close(choice.request_id, ended_at=ended_at, cause=cause)
        has_begun = choice.last_token_at is not None
        self._levels.note_end(generation.tenant, choice.pace, cause, has_begun=has_begun)
        if ended_at is not None:
            self._metrics.latencies(generation.tenant).ended(ended_at - generation.arrived_at)
            num_outputs = generation.num_outputs.get(choice.index, 0)
            self._metrics.observe_length("output", num_outputs, at=ended_at)

    def _note_admission(self, choice: Choice, now: float) -> None:
        # Readmissions after a preemption are no queueing.
        num_outputs = choice.generation.num_outputs
        if choice.index not in num_outputs:
            latencies = self._metrics.latencies(choice.generation.tenant)
            seconds = now - choice.generation.arrived_at
            latencies.admitted(seconds, at=now)
            self._levels.queue_times.note(seconds)
        num_outputs.setdefault(choice.index, 0)

    def _note_token(self, choice: Choice, now: float) -> None:
        tenant = choice.generation.tenant
        latencies, window = self._metrics.latencies(tenant), self._levels.window(tenant)
        if choice.last_token_at is None:
            seconds = now - choice.generation.arrived_at
            latencies.first_token(seconds)
            if window is not None:
                window.note_first_token(choice.pace, seconds, now)
        else:
            seconds = now - choice.last_token_at
            latencies.next_token(seconds)
            if window is not None:
                window.note_gap(choice.pace, seconds, now)
        choice.last_token_at = now
