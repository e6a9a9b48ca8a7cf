import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tidegate_operator.kube import ApiError
from tidegate_operator.metrics import Metrics
from tidegate_operator.planner import StatusUpdate
from tidegate_operator.resources import Resource, TenantPolicy
from tidegate_operator.status import HOLD_SECONDS, StatusWriter, listed_status
from tidegate_operator.verdicts import Json


class RecordingApi:
    """Takes statuses as the API server does, and fails on demand."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, Any]] = []
        self.failures: list[Exception] = []
        self.written = asyncio.Event()
        self.asked = asyncio.Event()
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def apply_status(self, model: type[Resource], metadata: Json, status: Json) -> None:
        assert model is TenantPolicy
        self.asked.set()
        await self.is_open.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.writes.append((metadata["name"], status))
        self.written.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.writes) < count:
                self.written.clear()
                await self.written.wait()


def an_update(
    name: str = "a", *, value: int = 1, generation: int = 1, is_settled: bool = True, **fields: Any
) -> StatusUpdate:
    conditions = [{"type": "Ready", "status": str(value)}]
    status = {"observedGeneration": generation, "conditions": conditions, **fields}
    return StatusUpdate(
        model=TenantPolicy,
        namespace="team",
        name=name,
        uid=f"uid-{name}",
        status=status,
        is_settled=is_settled,
    )


@asynccontextmanager
async def running(writer: StatusWriter) -> AsyncIterator[None]:
    task = asyncio.create_task(writer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def a_writer(api: RecordingApi, *, rate: float = 1000.0) -> StatusWriter:
    return StatusWriter(api, metrics=Metrics(), writes_per_second=rate)


async def test_only_what_differs_from_the_stored_status_is_written() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    writer.observe("uid-a", an_update("a").status)
    async with running(writer):
        writer.submit(an_update("a"))
        writer.submit(an_update("b"))
        await api.wait_for(1)
        writer.submit(an_update("b"))
        writer.submit(an_update("c"))
        await api.wait_for(2)
    assert [name for name, _ in api.writes] == ["b", "c"]
    assert writer.known("uid-b") == an_update("b").status


async def test_newest_status_replaces_what_waits() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    for value in range(5):
        writer.submit(an_update(value=value))
    async with running(writer):
        await api.wait_for(1)
    assert [status["conditions"][0]["status"] for _, status in api.writes] == ["4"]


async def test_what_changes_while_a_status_is_written_is_written_after_it() -> None:
    api = RecordingApi()
    api.is_open.clear()
    writer = a_writer(api)
    async with running(writer):
        writer.submit(an_update(value=1))
        await api.asked.wait()
        writer.submit(an_update(value=2))
        writer.submit(an_update("b"))
        api.is_open.set()
        await api.wait_for(3)
    assert [status["conditions"][0]["status"] for name, status in api.writes if name == "a"] == [
        "1",
        "2",
    ]


async def test_unsettled_status_waits_for_the_settled_one() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    async with running(writer):
        started = asyncio.get_running_loop().time()
        writer.submit(an_update(value=0, is_settled=False))
        writer.submit(an_update(value=1))
        await api.wait_for(1)
        assert asyncio.get_running_loop().time() - started < HOLD_SECONDS
        writer.submit(an_update(value=2, is_settled=False))
        await api.wait_for(2)
        assert asyncio.get_running_loop().time() - started >= HOLD_SECONDS
    assert [status["conditions"][0]["status"] for _, status in api.writes] == ["1", "2"]


async def test_status_of_an_older_generation_is_never_written() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    writer.observe("uid-a", an_update(generation=5).status)
    async with running(writer):
        writer.submit(an_update(generation=4, value=9))
        writer.submit(an_update("b"))
        await api.wait_for(1)
    assert [name for name, _ in api.writes] == ["b"]


async def test_conditions_go_before_usage() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    writer.observe("uid-a", an_update("a").status)
    writer.submit(an_update("a", usage={"running": 1}))
    writer.submit(an_update("b"))
    async with running(writer):
        await api.wait_for(2)
    assert [name for name, _ in api.writes] == ["b", "a"]


async def test_writes_keep_to_the_budget() -> None:
    api = RecordingApi()
    writer = a_writer(api, rate=20.0)
    async with running(writer):
        started = asyncio.get_running_loop().time()
        for number in range(30):
            writer.submit(an_update(f"{number}"))
        await api.wait_for(30)
        assert asyncio.get_running_loop().time() - started >= 0.45


async def test_less_than_one_write_per_second_is_a_budget_too() -> None:
    api = RecordingApi()
    writer = a_writer(api, rate=0.5)
    async with running(writer):
        writer.submit(an_update())
        await api.wait_for(1)


async def test_object_that_is_gone_is_forgotten() -> None:
    api = RecordingApi()
    api.failures = [ApiError(404, "PATCH", "gone")]
    writer = a_writer(api)
    async with running(writer):
        writer.submit(an_update("a"))
        writer.submit(an_update("b"))
        await api.wait_for(1)
        assert writer.known("uid-a") == {}
    assert [name for name, _ in api.writes] == ["b"]


@pytest.mark.parametrize(
    "failure",
    [
        ApiError(503, "PATCH", "busy"),
        ApiError(409, "PATCH", "the object has been modified"),
        ConnectionError("reset"),
    ],
)
async def test_failed_write_is_tried_again(failure: Exception) -> None:
    api = RecordingApi()
    api.failures = [failure]
    writer = a_writer(api)
    async with running(writer):
        writer.submit(an_update("a"))
        await api.wait_for(1)
    assert api.writes == [("a", an_update("a").status)]


async def test_change_by_somebody_else_is_noticed_by_a_sweep() -> None:
    writer = a_writer(RecordingApi())
    assert not writer.observe("uid-a", an_update(value=1).status)
    assert not writer.observe("uid-a", an_update(value=1).status)
    assert writer.observe("uid-a", {})
    assert writer.known("uid-a") == {}


async def test_status_about_a_generation_that_a_restored_backup_undid_is_replaced() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    undone = an_update(generation=2).status
    writer.observe("uid-a", listed_status({"metadata": {"generation": 2}, "status": undone}))
    assert writer.known("uid-a") == undone
    restored = listed_status({"metadata": {"generation": 1}, "status": undone})
    assert writer.observe("uid-a", restored)
    async with running(writer):
        writer.submit(an_update(generation=1))
        await api.wait_for(1)
    assert api.writes == [("a", an_update(generation=1).status)]


async def test_condition_of_somebody_else_is_no_change() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    foreign = {"type": "example.com/Audited", "status": "True"}
    listed = an_update("a").status
    listed = listed | {"conditions": [foreign, *listed["conditions"]]}
    writer.observe("uid-a", an_update("a").status)
    assert not writer.observe("uid-a", listed)
    async with running(writer):
        writer.submit(an_update("a"))
        writer.submit(an_update("b"))
        await api.wait_for(1)
    assert [name for name, _ in api.writes] == ["b"]


async def test_list_asked_for_before_a_write_does_not_undo_it() -> None:
    api = RecordingApi()
    writer = a_writer(api)
    writer.begin_sweep()
    async with running(writer):
        writer.submit(an_update("a"))
        await api.wait_for(1)
        writer.submit(an_update("b"))
        await api.wait_for(2)
        assert not writer.observe("uid-a", {})
    assert writer.known("uid-a") == an_update("a").status
