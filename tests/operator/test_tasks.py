import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tidegate_operator.tasks import PartEndedError, cancel_all, in_a_line


async def stubborn(refusals: int) -> None:
    """Swallow some cancellations."""
    for _ in range(refusals + 1):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


async def test_tasks_that_swallow_a_cancellation_end_all_the_same() -> None:
    tasks = [asyncio.create_task(stubborn(refusals)) for refusals in (0, 1, 2)]
    await asyncio.sleep(0)
    await cancel_all(tasks)
    assert all(task.done() for task in tasks)


async def test_what_has_ended_needs_no_cancel() -> None:
    ended = asyncio.create_task(stubborn(-1))
    await ended
    await cancel_all([ended])


async def fail() -> None:
    raise OSError("no ink")


async def fail_in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
        group.create_task(asyncio.Event().wait())


@pytest.mark.parametrize("failing", [fail, fail_in_a_group])
async def test_part_that_failed_is_named_with_its_error(failing: Callable[..., Any]) -> None:
    task = asyncio.create_task(failing(), name="the writer")
    await asyncio.wait([task])
    assert str(PartEndedError(task)) == "the writer ended: OSError: no ink"


async def test_part_that_just_ended_is_named_as_well() -> None:
    returned = asyncio.create_task(stubborn(-1), name="the writer")
    cancelled = asyncio.create_task(stubborn(0), name="the reader")
    cancelled.cancel()
    await asyncio.wait([returned, cancelled])
    assert str(PartEndedError(returned)) == "the writer ended: it returned"
    assert str(PartEndedError(cancelled)) == "the reader ended: it was cancelled"


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("a\n  b"), "ValueError: a b"), (TimeoutError(), "TimeoutError")],
)
def test_error_is_told_in_a_line(error: Exception, text: str) -> None:
    assert in_a_line(error) == text


def test_process_that_hangs_at_its_end_is_killed_and_shows_where() -> None:
    hanging = (
        "from tidegate_operator import tasks\n"
        "tasks.END_SECONDS = 0.2\n"
        "tasks.end_process_in_time()\n"
        "while True: pass\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", hanging], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert 'File "<string>", line 4' in ended.stderr
