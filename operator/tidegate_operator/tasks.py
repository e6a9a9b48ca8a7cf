"""Ending asyncio tasks for certain."""

import asyncio
from collections.abc import Iterable
from typing import Any

_REPEAT_SECONDS = 0.1


async def cancel_all(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended.

    Cancels again what goes on: on Python 3.11 `asyncio.wait_for`, through which the Redis client
    sends, swallows a cancellation that comes together with the result. Each task must be one that
    calls Redis itself: a task group passes on the first cancellation alone.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_REPEAT_SECONDS)
