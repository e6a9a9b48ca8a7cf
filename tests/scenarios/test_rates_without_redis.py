"""Rate limits of two engine processes whose Redis goes away and comes back empty."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import RateRule
from tidegate_testing.control import Publisher, until
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import MODEL, a_keyed_tenant, key_of
from tidegate_testing.policies import a_snapshot

PER_SECOND = 100
DEPTH = 600  # a tenth of a minute's
COST = 100  # tokens of a request


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of this test's, which may be stopped."""
    with RedisServer(tmp_path / "redis", Assets.from_environment()) as started:
        yield started


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield client


def an_engine(
    publisher: Publisher, folder: Path, pod: str
) -> AbstractContextManager[EngineProcess]:
    own = folder / pod
    own.mkdir()
    return an_engine_process(
        publisher,
        own,
        TIDEGATE_POD_NAME=pod,
        TIDEGATE_KV_BLOCKS="4096",
        TIDEGATE_SIMULATED_STEP_SECONDS="0.002",
        TIDEGATE_SIMULATED_DECODE_SECONDS="0",
        TIDEGATE_SIMULATED_PREFILL_TOKEN_SECONDS="0",
    )


def is_divided(engine: EngineProcess) -> bool:
    answer = engine.get("/metrics")
    assert answer is not None
    return any(
        sample.value == 1
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.name == "tidegate_rate_limits_divided"
    )


async def test_each_has_half_of_the_limit_also_where_one_had_no_traffic_and_both_pay_for_it(
    server: RedisServer, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    publisher = Publisher(server.url)
    redis = Redis.from_url(server.url, decode_responses=True)
    numbers = iter(range(10**6))

    async def passes(engine: EngineProcess) -> bool:
        number = next(numbers)
        body = {
            "model": MODEL,
            "prompt": [number % 50, number // 50 % 50, *[7] * 18],
            "max_tokens": COST - 20,
            "ignore_eos": True,
        }
        url = f"http://127.0.0.1:{engine.port}/v1/completions"
        headers = {"authorization": f"Bearer {key_of('acme')}"}
        return (await client.post(url, json=body, headers=headers)).status_code == 200

    def leases() -> list[float]:
        """Return what each engine that has ever leased holds."""
        fields = redis.hgetall(f"tidegate:{publisher.pool}:rate:tokens:acme")
        return [float(text.split()[0]) for name, text in fields.items() if ":" in name]

    rule = RateRule(
        tokens_per_minute=60 * PER_SECOND, burst_percent=DEPTH // PER_SECOND * 100 // 60
    )
    publisher.publish(a_snapshot(a_keyed_tenant("acme", rate=rule)), 1)
    with (
        an_engine(publisher, tmp_path, "engine-0") as busy,
        an_engine(publisher, tmp_path, "engine-1") as idle,
    ):
        engines = (busy, idle)
        for engine in engines:
            await asyncio.to_thread(engine.wait_until_ready)
        counted = f"tidegate:{publisher.pool}:rate-engines"
        await until(lambda: redis.zcard(counted) == 2, "both to be counted")
        assert await passes(busy)
        await until(lambda: leases() == [0], "nothing leased by anybody")

        server.stop()
        await until(lambda: all(map(is_divided, engines)), "both to know")
        # What they have saved up until now is not to be counted.
        while any([await passes(engine) for engine in engines]):
            pass
        began, passed = time.monotonic(), 0
        while (elapsed := time.monotonic() - began) < 6:
            passed += sum([await passes(engine) for engine in engines])
        assert passed * COST <= PER_SECOND * elapsed + 2 * COST
        assert passed * COST >= PER_SECOND * elapsed / 2

        server.restart()
        await until(lambda: not any(map(is_divided, engines)), "both to lease again")
        assert len(leases()) == 2
        # The one that came last has paid its part of a bucket that was full at most.
        level = redis.hget(f"tidegate:{publisher.pool}:rate:tokens:acme", "level")
        assert float(str(level)) <= DEPTH / 2 + COST
