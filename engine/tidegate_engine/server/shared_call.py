"""Work that is done for all who ask at the same time, once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCall(Generic[T]):
    """A piece of work that runs at most once at a time, in the event loop."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None

    def begin(self) -> "asyncio.Task[T]":
        """Begin the work, unless it runs already, without waiting for its end."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._work())
        return self._running

    async def __call__(self) -> T:
        """Return the result of the run in progress, or of a new one."""
        # Shielded: who asks no more takes nothing from the others.
        return await asyncio.shield(self.begin())
