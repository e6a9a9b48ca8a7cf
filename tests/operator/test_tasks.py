import asyncio

from tidegate_operator.tasks import cancel_all


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
