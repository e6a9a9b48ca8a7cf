"""Work that is done once for all who ask at the same time."""

import asyncio

from tidegate_engine.server.shared_call import SharedCall


async def test_who_asks_while_it_runs_gets_what_comes_of_it_and_who_asks_later_something_new() -> (
    None
):
    begun: list[asyncio.Future[int]] = []

    async def work() -> int:
        begun.append(asyncio.get_running_loop().create_future())
        return await begun[-1]

    call = SharedCall(work)
    both = asyncio.gather(call(), call())
    await asyncio.sleep(0)
    call.begin()
    await asyncio.sleep(0)
    begun[0].set_result(7)
    assert list(await both) == [7, 7]
    assert len(begun) == 1
    third = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    begun[1].set_result(8)
    assert await third == 8


async def test_who_asks_no_more_takes_nothing_from_the_others() -> None:
    released = asyncio.Event()

    async def work() -> bool:
        return await released.wait()

    call = SharedCall(work)
    impatient, patient = (asyncio.ensure_future(call()) for _ in range(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.wait({impatient})
    released.set()
    assert await patient
