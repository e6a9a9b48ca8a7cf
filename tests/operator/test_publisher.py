import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
from kubernetes.aio.client import Configuration
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tidegate_operator import publisher as publisher_module
from tidegate_operator.compiler import CompiledPool, compile_pool
from tidegate_operator.delivery import ContestedRevisionError, Delivery
from tidegate_operator.kube import KubeApi
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.progress import Published, Stored
from tidegate_operator.publisher import Publisher
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.status import StatusWriter
from tidegate_testing.objects import a_view, an_engine_pool


class GatedDelivery(Delivery):
    """Stores nothing; waits for `gate`, and fails for the pools that are told so."""

    def __init__(self) -> None:
        super().__init__(Redis(), lambda message: message.hex())
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: dict[str, Exception] = {}
        self.attempts: list[str] = []

    async def publish(
        self, compiled: CompiledPool, seen: Mapping[str, tuple[int, str]]
    ) -> tuple[Published, bool]:
        assert not seen
        self.attempts.append(compiled.pool)
        await self.gate.wait()
        if compiled.pool in self.failures:
            raise self.failures[compiled.pool]
        return Published(revision=1, digest=compiled.snapshot.digest, time="t"), True

    async def stored(self, pool: str) -> Stored | None:
        assert pool
        return None


class Publishing:
    """A publisher of the pools `team/a` and `team/b`."""

    def __init__(self) -> None:
        book, metrics, self.delivery = ReportBook(), Metrics(), GatedDelivery()
        api = KubeApi(Configuration())
        writer = StatusWriter(api, metrics=metrics, writes_per_second=1.0)
        self.pools = Pools(book)
        self.publisher = Publisher(
            self.pools,
            delivery=self.delivery,
            book=book,
            writer=writer,
            reporter=Reporter(self.pools, writer=writer, metrics=metrics),
            metrics=metrics,
        )
        for name in ("a", "b"):
            self.record(name)

    def record(self, name: str) -> PoolRecord:
        """Remember a pool as just compiled."""
        pool = an_engine_pool(name)
        record = PoolRecord(compile_pool(a_view(pool), pool))
        self.pools.records[f"team/{name}"] = record
        return record

    def published(self, name: str) -> bool:
        return self.pools.records[f"team/{name}"].published is not None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self.publisher.run()),
            asyncio.create_task(self.publisher.watch_store()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("error", [ResponseError("WRONGTYPE"), ContestedRevisionError("team/a")])
async def test_pool_that_is_refused_stands_in_nobodys_way(error: Exception) -> None:
    publishing = Publishing()
    publishing.delivery.failures["team/a"] = error
    async with publishing.running():
        publishing.publisher.publish(["team/a", "team/b"])
        await becomes(lambda: publishing.published("b"))
        assert publishing.pools.is_storing
        assert publishing.pools.records["team/a"].is_refused
        del publishing.delivery.failures["team/a"]
        await becomes(lambda: publishing.published("a"))
    assert not publishing.pools.records["team/a"].is_refused


async def test_without_a_connection_no_other_pool_is_tried() -> None:
    publishing = Publishing()
    publishing.delivery.failures["team/a"] = ConnectionError()
    async with publishing.running():
        publishing.publisher.publish(["team/a", "team/b"])
        await becomes(lambda: not publishing.pools.is_storing)
        assert publishing.delivery.attempts == ["team/a"]
        del publishing.delivery.failures["team/a"]
        await becomes(lambda: publishing.published("a") and publishing.published("b"))
    assert publishing.pools.is_storing


async def test_pool_recreated_while_its_policy_is_stored_is_published_too() -> None:
    publishing = Publishing()
    publishing.delivery.gate.clear()
    async with publishing.running():
        publishing.publisher.publish(["team/a"])
        await becomes(lambda: len(publishing.delivery.attempts) == 1)
        publishing.record("a")
        publishing.publisher.publish(["team/a"])
        publishing.delivery.gate.set()
        await becomes(lambda: publishing.published("a"))


async def test_pool_that_was_never_published_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "STORE_CHECK_SECONDS", 0.01)
    publishing = Publishing()
    async with publishing.running():
        await becomes(lambda: publishing.published("a") and publishing.published("b"))
