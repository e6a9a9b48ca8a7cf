import asyncio

import pytest

from tidegate_cli.guard import guarded


class EngineError(Exception):
    pass


class OperatorError(Exception):
    pass


def all_is_well() -> None:
    pass


def operator_has_ended() -> None:
    raise OperatorError


async def test_the_work_gives_its_result() -> None:
    async def work() -> int:
        return 7

    assert await guarded(work(), operator_has_ended) == 7


async def test_work_that_would_wait_for_ever_is_given_up() -> None:
    cleaned_up = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned_up.append("work")

    with pytest.raises(OperatorError):
        await guarded(work(), operator_has_ended)

    assert cleaned_up == ["work"]


async def test_a_cause_is_told_before_its_consequence() -> None:
    async def work() -> None:
        raise EngineError

    with pytest.raises(OperatorError):
        await guarded(work(), operator_has_ended)
    with pytest.raises(EngineError):
        await guarded(work(), all_is_well)


async def test_cancelling_cancels_the_work() -> None:
    begun, cleaned_up = asyncio.Event(), []

    async def work() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleaned_up.append("work")

    guard = asyncio.create_task(guarded(work(), all_is_well))
    await begun.wait()
    guard.cancel()

    with pytest.raises(asyncio.CancelledError):
        await guard
    assert cleaned_up == ["work"]
