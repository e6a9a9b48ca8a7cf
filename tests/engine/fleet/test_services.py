"""Engines tell each other through real Redis whom they served."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import count

import pytest
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.core.request import AccountStats
from tidegate_engine.fleet.services import ServiceExchange

_pools = count(1)


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, socket_timeout=2)
    yield client
    await client.aclose()


class Engine:
    """One engine's count, and what it heard of others."""

    def __init__(self, redis: Redis, pool: str, name: str) -> None:
        self.stats: dict[str, AccountStats] = {}
        self.heard: dict[str, float] = {}
        self.active: list[str] = []
        self.exchange = ServiceExchange(
            redis, pool=pool, engine=name, served=lambda: self.stats, listener=self._hear
        )

    def serve(self, tenant: str, service: float, *, waiting: int = 1) -> None:
        before = self.stats[tenant].service if tenant in self.stats else 0.0
        self.stats[tenant] = AccountStats(before + service, competes=waiting > 0)

    def _hear(self, service: Mapping[str, float], active: Sequence[str]) -> None:
        for name, cost in service.items():
            self.heard[name] = self.heard.get(name, 0.0) + cost
        self.active = sorted(active)


async def a_fleet(redis: Redis, size: int) -> list[Engine]:
    pool = f"services/{next(_pools)}"
    engines = [Engine(redis, pool, f"engine-{number}") for number in range(size)]
    await exchange(engines)
    return engines


async def exchange(engines: Sequence[Engine]) -> None:
    """Let all tell, and then all listen."""
    for engine in [*engines, *engines]:
        await engine.exchange.exchange()


async def test_everybody_hears_what_the_others_gave_and_nobody_its_own(redis: Redis) -> None:
    one, other, third = engines = await a_fleet(redis, 3)
    one.serve("acme", 10)
    other.serve("acme", 20)
    other.serve("zeta", 5)
    await exchange(engines)
    assert one.heard == {"acme": 20, "zeta": 5}
    assert other.heard == {"acme": 10}
    assert third.heard == {"acme": 30, "zeta": 5}
    other.serve("acme", 1)
    await exchange(engines)
    assert one.heard == {"acme": 21, "zeta": 5}


async def test_who_has_work_elsewhere_is_known_until_it_is_done(redis: Redis) -> None:
    one, other = engines = await a_fleet(redis, 2)
    other.serve("acme", 1)
    await exchange(engines)
    assert (one.active, other.active) == (["acme"], [])
    other.serve("acme", 1, waiting=0)
    await exchange(engines)
    assert one.active == []


async def test_an_engine_that_comes_later_takes_the_past_for_nobodys_advantage(
    redis: Redis,
) -> None:
    pool = f"services/{next(_pools)}"
    old = Engine(redis, pool, "old")
    old.serve("acme", 1000)
    await old.exchange.exchange()
    new = Engine(redis, pool, "new")
    await exchange([old, new])
    assert new.heard == {}
    old.serve("acme", 7)
    await exchange([old, new])
    assert new.heard == {"acme": 7}


async def test_a_tenant_that_was_forgotten_and_comes_back_is_counted_on(redis: Redis) -> None:
    one, other = engines = await a_fleet(redis, 2)
    one.serve("acme", 10)
    await exchange(engines)
    one.stats = {}
    await exchange(engines)
    one.serve("acme", 3)
    await exchange(engines)
    assert (one.heard, other.heard) == ({}, {"acme": 13})


async def test_an_emptied_redis_costs_nobody_anything(redis: Redis) -> None:
    one, other = engines = await a_fleet(redis, 2)
    one.serve("acme", 10)
    await exchange(engines)
    await redis.delete(*await redis.keys("tidegate:services/*"))
    await exchange(engines)
    assert other.heard == {"acme": 10}
    one.serve("acme", 2)
    await exchange(engines)
    assert (one.heard, other.heard) == ({}, {"acme": 12})


async def test_without_redis_nobody_counts_as_competing_elsewhere(redis: Redis) -> None:
    one, other = engines = await a_fleet(redis, 2)
    other.serve("acme", 1)
    await exchange(engines)
    assert one.active == ["acme"]
    lost = Redis.from_url("redis://127.0.0.1:1")
    cut_off = Engine(lost, "services/nowhere", "cut-off")
    cut_off.active = ["acme"]
    running = asyncio.create_task(cut_off.exchange.run())
    while cut_off.active:
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    await lost.aclose()
