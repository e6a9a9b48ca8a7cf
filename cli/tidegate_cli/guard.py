"""Work that goes on only while everything it depends on lives."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")

_POLL_SECONDS = 0.5


async def guarded(work: Awaitable[_T], check: Callable[[], None]) -> _T:
    """Do the work, but give it up as soon as `check` raises, and raise that.

    What the work fails with may be the consequence of what `check` knows, so that comes first.
    """
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_POLL_SECONDS)
            if not task.done() or task.cancelled() or task.exception() is not None:
                check()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
