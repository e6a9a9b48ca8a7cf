"""From the engine's thread into the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from tidegate_engine.events import EngineStats, PolicyApplied, StepReport
from tidegate_engine.loop import EngineStoppedError


class CountedEngine(Protocol):
    """An engine as who counts what is in it sees it; an `EngineLoop` is one."""

    @property
    def last_stats(self) -> EngineStats:
        """The newest answer to `stats`."""

    def stats(self) -> "Future[EngineStats]":
        """Count at the next step boundary."""


class EngineBridge:
    """Passes on what the engine's thread tells, one wake-up of the event loop a step.

    Attributes:
        on_step: Called in the event loop with every step, in order.
        on_policy: Called in the event loop when a policy took effect.
        on_stop: Called in the event loop when the engine's thread has ended.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop
        self.on_step: list[Callable[[StepReport], None]] = []
        self.on_policy: list[Callable[[PolicyApplied], None]] = []
        self.on_stop: list[Callable[[], None]] = []

    def step_done(self, report: StepReport) -> None:
        """Pass on a step; called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(_call_all, self.on_step, report)

    def policy_applied(self, applied: PolicyApplied) -> None:
        """Pass on a policy; called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(_call_all, self.on_policy, applied)

    def engine_stopped(self) -> None:
        """Pass on the end; called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(_call_all, self.on_stop)


async def engine_stats(engine: CountedEngine, *, patience_seconds: float) -> EngineStats:
    """Count at the next step boundary; when that is too far away, return the last count."""
    try:
        async with asyncio.timeout(patience_seconds):
            # Shielded: a count that nobody waits for any more still becomes `last_stats`.
            return await asyncio.shield(asyncio.wrap_future(engine.stats()))
    except (TimeoutError, EngineStoppedError):
        return engine.last_stats


def _call_all(callbacks: list[Callable[..., None]], *arguments: object) -> None:
    for callback in callbacks:
        callback(*arguments)
