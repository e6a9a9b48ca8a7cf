"""Listening to engines over a real Redis and a network that can go silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator import reports
from tidegate_operator.reports import ReportListener
from tidegate_policies.wire import EngineReport, reports_channel

pytestmark = pytest.mark.cluster

POOL = "listening/chat"


class SilentNetwork:
    """Passes bytes to Redis and back; connections that are cut stay open and carry nothing."""

    def __init__(self, redis_url: str) -> None:
        target = urlsplit(redis_url)
        self._target = (target.hostname, target.port)
        self._cut: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.pongs = 0

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Silence all connections that exist."""
        self._cut.update(range(self.connections))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        there = await asyncio.open_connection(*self._target)
        for source, target in ((reader, there[1]), (there[0], writer)):
            self._tasks.add(asyncio.create_task(self._pass(number, source, target)))

    async def _pass(
        self, number: int, source: asyncio.StreamReader, target: asyncio.StreamWriter
    ) -> None:
        try:
            while chunk := await source.read(65536):
                if number not in self._cut:
                    self.pongs += chunk.lower().count(b"pong")
                    target.write(chunk)
        finally:
            target.close()


async def becomes(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_silent_connection_is_left_and_a_quiet_one_kept(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(reports, "QUIET_SECONDS", 0.1)
    monkeypatch.setattr(reports, "DEAF_SECONDS", 0.5)
    network = SilentNetwork(redis_server.url)
    heard: list[EngineReport] = []
    states: list[bool] = []
    async with (
        network.url() as url,
        Redis.from_url(url, socket_timeout=2.0) as far,
        Redis.from_url(redis_server.url) as near,
    ):
        listener = ReportListener(far, on_report=heard.append, on_connection=states.append)
        task = asyncio.create_task(listener.run())
        try:
            # So many answers take longer than a connection may be silent.
            await becomes(lambda: network.pongs > 10)
            assert states == [True]
            network.cut()
            await becomes(lambda: states == [True, False, True])
            report = EngineReport(pool=POOL, pod="a", incarnation="i", sequence=1)
            await near.publish(reports_channel(POOL), report.to_json())
            await becomes(lambda: report in heard)
        finally:
            task.cancel()
            await asyncio.wait([task])
