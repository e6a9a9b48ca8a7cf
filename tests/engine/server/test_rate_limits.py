"""Rate limits of a pool, over real sockets and a real Redis, with two engines."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from redis import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.events import CancelCause
from tidegate_policies.rules import RateRule
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    MODEL,
    HeldTokenizer,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
    key_of,
)
from tidegate_testing.policies import POOL, a_snapshot
from tidegate_testing.raw_requests import a_raw_request
from tidegate_testing.scheduling import a_request


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """The URL of a Redis that knows nothing of the pool."""
    with Redis.from_url(redis_server.url) as redis:
        for key in redis.keys(f"tidegate:{POOL}:rate*"):
            redis.delete(key)
    return redis_server.url


@contextmanager
def two_engines(
    redis_url: str, rate: RateRule, *, max_num_seqs: int = 32
) -> Iterator[list[RunningEngine]]:
    policy = a_snapshot(a_keyed_tenant(rate=rate), a_keyed_tenant("free"))
    with (
        a_running_engine(policy, redis_url=redis_url, max_num_seqs=max_num_seqs) as one,
        a_running_engine(policy, redis_url=redis_url, max_num_seqs=max_num_seqs) as other,
    ):
        yield [one, other]


def ask(engine: RunningEngine, tenant: str = "acme", **body: Any) -> httpx.Response:
    content = {"model": MODEL, "prompt": [7] * 20, "max_tokens": 10, "ignore_eos": True, **body}
    return engine.http(tenant).post("/v1/completions", json=content)


def test_a_pools_requests_a_minute_are_shared_by_its_engines(redis_url: str) -> None:
    with two_engines(redis_url, RateRule(requests_per_minute=6, burst_percent=100)) as engines:
        answers = [ask(engines[number % 2]) for number in range(10)]
        assert [a.status_code for a in answers].count(200) == 6
        refused = next(a for a in answers if a.status_code == 429)
        assert refused.json()["error"]["code"] == "rate_limited"
        assert refused.headers["x-tidegate-reason"] == "rate_limited"
        assert "6 requests a minute" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert ask(engines[0], "free").status_code == 200


def test_what_was_set_aside_and_not_used_is_given_back(redis_url: str) -> None:
    with two_engines(redis_url, RateRule(tokens_per_minute=300)) as engines:
        # Nothing is known of the tenant's outputs: 128 tokens are set aside each time, 1 comes.
        stops = list(range(100))
        for _ in range(6):
            answer = ask(engines[0], max_tokens=200, ignore_eos=False, stop_token_ids=stops)
            assert answer.status_code == 200


def test_hundreds_of_callers_never_get_more_than_there_is(redis_url: str) -> None:
    async def ask_all(engines: list[RunningEngine]) -> list[int]:
        headers = {"authorization": f"Bearer {key_of('acme')}"}
        body = {"model": MODEL, "prompt": [7] * 5, "max_tokens": 5, "ignore_eos": True}
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(headers=headers, timeout=60, limits=limits) as client:
            answers = await asyncio.gather(
                *(
                    client.post(f"{engines[number % 2].base_url}/v1/completions", json=body)
                    for number in range(200)
                )
            )
        return [answer.status_code for answer in answers]

    with two_engines(redis_url, RateRule(tokens_per_minute=300)) as engines:
        codes = asyncio.run(ask_all(engines))
    assert set(codes) == {200, 429}
    assert 20 <= codes.count(200) <= 35  # 10 tokens each, a few more as time passes


def test_a_request_that_never_ran_costs_nothing(redis_url: str) -> None:
    with two_engines(redis_url, RateRule(tokens_per_minute=300), max_num_seqs=1) as engines:
        engine = engines[0]
        engine.service.engine.submit(a_request("free", output=100_000, request_id="long")).result()
        with a_raw_request(engine.port, prompt=[7] * 150, max_tokens=100):
            eventually(lambda: engine.stats().scheduler.waiting == 1, "one that waits")
        eventually(lambda: not engine.service.generations.running_ids, "its client has left")
        engine.service.engine.cancel("long", CancelCause.DELETE).result()
        eventually(engine.is_idle, "an idle engine")
        assert ask(engine, prompt=[7] * 150, max_tokens=50).status_code == 200


def test_what_the_prefix_cache_has_of_a_prompt_is_neither_set_aside_nor_charged(
    redis_url: str,
) -> None:
    rate = RateRule(tokens_per_minute=60, burst_percent=1000)
    with a_running_engine(a_snapshot(a_keyed_tenant(rate=rate)), redis_url=redis_url) as engine:
        answers = [ask(engine, prompt=[7] * 400, max_tokens=1) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5
        usage = answers[-1].json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 399
        assert ask(engine, prompt=[8] * 400, max_tokens=1).status_code == 429


@pytest.mark.parametrize("stream", [True, False])
def test_of_a_prompt_whose_client_left_what_was_computed_is_charged_and_no_more(
    redis_url: str, *, stream: bool
) -> None:
    rate = RateRule(tokens_per_minute=60, burst_percent=10_000)
    with a_running_engine(a_snapshot(a_keyed_tenant(rate=rate)), redis_url=redis_url) as engine:
        engine.gate.let_one_pass()  # none is held yet: the first will be
        with a_raw_request(engine.port, prompt=[7] * 5000, max_tokens=100, stream=stream):
            eventually(lambda: engine.gate.is_holding, "its first step")
            counted = engine.service.engine.stats()
            engine.gate.let_one_pass()
            counted.result(timeout=10)
            eventually(lambda: engine.gate.is_holding, "its second step")
        eventually(lambda: not engine.service.generations.running_ids, "its client has left")
        engine.gate.open()
        eventually(engine.is_idle, "an idle engine")
        computed = engine.stats().scheduler.tenants["acme"].prompt_tokens
        assert computed == 2 * 256
        left = 6000 - computed
        assert ask(engine, prompt=[8] * (left + 100), max_tokens=1).status_code == 429
        assert ask(engine, prompt=[8] * (left - 1), max_tokens=1).status_code == 200


def test_what_was_computed_and_never_read_is_charged(redis_url: str) -> None:
    with two_engines(redis_url, RateRule(tokens_per_minute=1000)) as engines:
        engine = engines[0]
        body = {"model": MODEL, "prompt": [7] * 20, "max_tokens": 800, "ignore_eos": True}
        with engine.http().stream("POST", "/v1/completions", json={**body, "stream": True}):
            eventually(lambda: engine.stats().scheduler.tenants["acme"].finished == 1, "its end")
        eventually(lambda: not engine.service.generations.running_ids, "nobody reads it")
        assert ask(engine, prompt=[7] * 300).status_code == 429


def test_without_redis_each_engine_goes_on_and_says_so() -> None:
    policy = a_snapshot(a_keyed_tenant(rate=RateRule(requests_per_minute=600)))
    with a_running_engine(policy) as engine:
        assert ask(engine).status_code == 429
        assert engine.sample("tidegate_rate_limits_divided") == 1
        eventually(lambda: ask(engine).status_code == 200, "its part of the limit")


def test_who_was_told_to_come_later_is_refused_before_anything_is_encoded(redis_url: str) -> None:
    tokenizer = HeldTokenizer()
    tokenizer.released.set()
    policy = a_snapshot(a_keyed_tenant(rate=RateRule(requests_per_minute=1)))
    with a_running_engine(
        policy, redis_url=redis_url, model=a_served_model(tokenizer=tokenizer)
    ) as engine:
        assert ask(engine).status_code == 200
        assert ask(engine).status_code == 429
        refused = ask(engine, prompt="x" * 5000)
        assert refused.json()["error"]["code"] == "rate_limited"
        assert "1 requests a minute" in refused.json()["error"]["message"]
        assert not tokenizer.begun.is_set()
        engine.apply(a_snapshot(a_keyed_tenant()))
        assert ask(engine, prompt="x" * 5000).status_code == 200
