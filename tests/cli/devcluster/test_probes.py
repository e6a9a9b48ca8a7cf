from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import chain, repeat

import aiohttp
import pytest
from aiohttp import web

from tidegate_devcluster.network import PodPlace
from tidegate_devcluster.probes import Probe, probe_of

CONTAINER = {
    "name": "web",
    "ports": [{"name": "http", "containerPort": 8000}],
    "readinessProbe": {"httpGet": {"path": "/readyz", "port": "http"}, "failureThreshold": 2},
}


@pytest.fixture
def answers() -> list[int]:
    """Statuses that the server below gives one after the other; the last one from then on."""
    return [200]


@pytest.fixture
def given() -> list[int]:
    """The statuses that the server below has given so far."""
    return []


@pytest.fixture
async def url(answers: list[int], given: list[int]) -> AsyncIterator[str]:
    statuses = chain(answers, repeat(answers[-1]))

    async def answer(_: web.Request) -> web.Response:
        given.append(next(statuses))
        return web.Response(status=given[-1])

    app = web.Application()
    app.router.add_get("/readyz", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/readyz"
    await runner.cleanup()


async def verdicts(url: str, count: int) -> list[bool]:
    probe = Probe(
        url=url,
        headers={},
        initial_delay_seconds=0.0,
        period_seconds=0.001,
        timeout_seconds=1.0,
        failure_threshold=3,
        success_threshold=2,
    )
    found: list[bool] = []
    async with aiohttp.ClientSession() as session, asyncio.timeout(10):
        async for verdict in probe.verdicts(session):
            found.append(verdict)
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("answers", [[200, 503, 200, 200, 503, 503, 200, 503, 503, 503]])
async def test_only_enough_answers_in_a_row_change_the_verdict(
    url: str, answers: list[int], given: list[int]
) -> None:
    assert await verdicts(url, 2) == [True, False]
    assert given == answers


@pytest.mark.parametrize("answers", [[503, 399, 200, 400]])
async def test_statuses_below_400_pass(url: str) -> None:
    assert await verdicts(url, 2) == [True, False]


async def test_nobody_listening_fails() -> None:
    assert await verdicts("http://127.0.0.1:9/readyz", 1) == [False]


async def test_a_tcp_probe_passes_while_somebody_listens() -> None:
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert await verdicts(f"tcp://127.0.0.1:{port}", 1) == [True]
    assert await verdicts(f"tcp://127.0.0.1:{port}", 1) == [False]


def test_a_tcp_probe_is_of_the_containers_port() -> None:
    container = {**CONTAINER, "livenessProbe": {"tcpSocket": {"port": "http"}}}

    probe = probe_of(container, "livenessProbe", PodPlace("10.213.0.2", "10.213.0.2"))

    assert probe is not None
    assert probe.url == "tcp://10.213.0.2:8000"


def test_a_named_port_is_the_containers_and_defaults_are_those_of_kubernetes() -> None:
    probe = probe_of(CONTAINER, "readinessProbe", PodPlace("10.213.0.2", "10.213.0.2"))

    assert probe is not None
    assert probe.url == "http://10.213.0.2:8000/readyz"
    assert (probe.period_seconds, probe.timeout_seconds) == (10, 1)
    assert (probe.failure_threshold, probe.success_threshold) == (2, 1)


def test_on_loopback_the_real_port_is_asked() -> None:
    place = PodPlace("10.213.255.1", "127.0.0.1", ports={8000: 23456})

    probe = probe_of(CONTAINER, "readinessProbe", place)

    assert probe is not None
    assert probe.url == "http://127.0.0.1:23456/readyz"


def test_no_probe_is_declared_as_none() -> None:
    assert probe_of(CONTAINER, "livenessProbe", PodPlace("10.213.0.2", "10.213.0.2")) is None
