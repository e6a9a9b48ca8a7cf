import asyncio

from tidegate_operator.lull import Lull

QUIET_SECONDS = 0.02

HANG_SECONDS = 5.0
"""A wait that lasts this long would last for ever."""


def a_lull(longest_seconds: float) -> Lull:
    return Lull(quiet_seconds=QUIET_SECONDS, longest_seconds=lambda: longest_seconds)


async def disturb_for_ever(lull: Lull) -> None:
    while True:
        lull.disturb()
        await asyncio.sleep(QUIET_SECONDS / 10)


async def test_work_waits_for_what_happens_and_the_lull_after_it() -> None:
    lull, clock = a_lull(60.0), asyncio.get_running_loop().time
    waiting = asyncio.create_task(lull.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    began = last = clock()
    for _ in range(5):
        lull.disturb()
        last = clock()
        await asyncio.sleep(QUIET_SECONDS / 4)

    await asyncio.wait_for(waiting, HANG_SECONDS)

    assert last + QUIET_SECONDS <= clock() < began + 60.0


async def test_work_waits_no_longer_than_is_bearable() -> None:
    lull, clock = a_lull(0.1), asyncio.get_running_loop().time
    disturbing = asyncio.create_task(disturb_for_ever(lull))
    began = clock()

    await asyncio.wait_for(lull.wait(), HANG_SECONDS)

    assert clock() >= began + 0.1
    assert not disturbing.done()
    disturbing.cancel()


async def test_what_is_bearable_may_change_meanwhile() -> None:
    longest = 60.0
    lull = Lull(quiet_seconds=QUIET_SECONDS, longest_seconds=lambda: longest)
    disturbing = asyncio.create_task(disturb_for_ever(lull))
    waiting = asyncio.create_task(lull.wait())
    await asyncio.sleep(QUIET_SECONDS * 2)
    assert not waiting.done()

    longest = 0.0

    await asyncio.wait_for(waiting, HANG_SECONDS)
    disturbing.cancel()


async def test_what_was_waited_for_counts_once() -> None:
    lull = a_lull(60.0)
    lull.disturb()
    await asyncio.wait_for(lull.wait(), HANG_SECONDS)

    waiting = asyncio.create_task(lull.wait())
    await asyncio.sleep(QUIET_SECONDS * 2)

    assert not waiting.done()
    waiting.cancel()
