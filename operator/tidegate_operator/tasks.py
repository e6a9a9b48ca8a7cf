"""Ending asyncio tasks, and the process, for certain."""

import asyncio
import faulthandler
from collections.abc import Iterable
from typing import Any

_REPEAT_SECONDS = 0.1

END_SECONDS = 10.0
"""A process whose end takes longer is killed."""


class PartEndedError(Exception):
    """A task ended that has to run as long as the process.

    Attributes:
        part: Its name.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        super().__init__(f"{task.get_name()} ended: {_why(task)}")
        self.part = task.get_name()


def end_process_in_time() -> None:
    """Have this process killed after `END_SECONDS`, and shown where it hangs.

    By a thread that needs nothing of Python: the event loop may be what hangs.
    """
    faulthandler.dump_traceback_later(END_SECONDS, exit=True)


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


def in_a_line(error: BaseException) -> str:
    """Return what an error says, with its kind; of a group of errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")


def _why(task: "asyncio.Task[Any]") -> str:
    if task.cancelled():
        return "it was cancelled"
    error = task.exception()
    return "it returned" if error is None else in_a_line(error)
