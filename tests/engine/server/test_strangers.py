"""However many keys and names strangers think of, nothing of them stays."""

import asyncio
import gc
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
from redis import Redis
from starlette.types import ASGIApp, Message

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.server.app import create_app
from tidegate_policies.rules import (
    UNKNOWN_TENANT,
    UnknownAction,
    UnknownTenantsRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot

TOKEN = "the-gateways-own-token"
MANY = 25_000
"""Keys, and as many names."""

MOST_GROWTH_BYTES = 12 << 20
"""What allocators keep; the keys and names alone would be three times as much with their places."""

Header = tuple[bytes, bytes]


def a_policy(action: UnknownAction) -> PolicySnapshot:
    return a_snapshot(
        a_keyed_tenant("acme"),
        unknown_tenants=UnknownTenantsRule(action=action, tier="standard", max_running=4),
    )


def headers_of_strangers(count: int) -> Iterator[Sequence[Header]]:
    for _ in range(count):
        yield [(b"authorization", b"Bearer " + secrets.token_hex(24).encode())]
        yield [
            (b"authorization", f"Bearer {TOKEN}".encode()),
            (b"x-tidegate-tenant", secrets.token_hex(24).encode()),
        ]


async def status_of(app: ASGIApp, headers: Sequence[Header], body: bytes = b"") -> int:
    """Send one request without a socket."""
    came = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()
    sent: list[Message] = []

    async def receive() -> Message:
        if came:
            return came.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST" if body else "GET",
        "path": "/v1/completions" if body else "/v1/models",
        "headers": [*headers, (b"content-type", b"application/json")],
        "query_string": b"",
    }
    await app(scope, receive, send)
    return int(sent[0]["status"])


async def statuses(app: ASGIApp, count: int, body: bytes = b"") -> set[int]:
    return {await status_of(app, headers, body) for headers in headers_of_strangers(count)}


def run(engine: RunningEngine, count: int, body: bytes = b"") -> set[int]:
    engine.service.identities.trust_gateway(TOKEN)

    async def ask() -> set[int]:
        return await statuses(create_app(engine.service), count, body)

    return asyncio.run_coroutine_threadsafe(ask(), engine.event_loop).result(timeout=120)


def tenants_in_metrics(engine: RunningEngine) -> set[str]:
    return {value for _, labels in engine.samples() for name, value in labels if name == "tenant"}


def test_who_is_refused_leaves_no_memory_and_no_series() -> None:
    with a_running_engine(a_policy(UnknownAction.REJECT)) as engine:
        assert run(engine, 1000) == {401}
        num_series = len(engine.samples())
        gc.collect()
        before = psutil.Process().memory_info().rss
        assert run(engine, MANY) == {401}
        gc.collect()
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES
        assert len(engine.samples()) == num_series
        assert tenants_in_metrics(engine) <= {"acme", UNKNOWN_TENANT}
        assert set(engine.stats().scheduler.tenants) == {"acme"}


def test_who_is_let_in_is_one_tenant_with_all_others(redis_server: RedisServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 1}).encode()
    with (
        a_running_engine(a_policy(UnknownAction.ADMIT), redis_url=redis_server.url) as engine,
        Redis.from_url(redis_server.url) as redis,
    ):
        assert run(engine, 50, body) == {200}
        num_series, num_keys = len(engine.samples()), redis.dbsize()
        assert run(engine, 5000) == {200}
        assert run(engine, 250, body) == {200}
        assert len(engine.samples()) == num_series
        assert redis.dbsize() == num_keys
        assert tenants_in_metrics(engine) == {"acme", UNKNOWN_TENANT}
        tenants = engine.stats().scheduler.tenants
        assert tenants[UNKNOWN_TENANT].finished == 600
        assert set(tenants) == {"acme", UNKNOWN_TENANT}
        names = {one.tenant for one in engine.service.decisions.newest(10_000)}
        assert names == {UNKNOWN_TENANT}
