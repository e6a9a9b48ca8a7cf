"""Who calls two engine processes, and how urgently: keys, a gateway, headers; hundreds at once."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import BatchingRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.control import until
from tidegate_testing.engines import a_keyed_tenant, digest_of
from tidegate_testing.policies import a_snapshot
from tidegate_testing.two_engines import (
    Pool,
    Streams,
    ask,
    client,
    codes,
    policy,
    pool,
    two_engines,
)

__all__ = ["client", "pool"]

TOKEN = "the-gateways-own-token"
SENSELESS = ["9" * 400, "-1", "NaN", "1e309", "", "١٢٣"]


@pytest.fixture(scope="module")
def processes(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("engines")
    settings = {
        "TIDEGATE_TRUSTED_GATEWAY_TOKEN": TOKEN,
        "TIDEGATE_SIMULATED_STEP_SECONDS": "0.015",
    }
    with two_engines(redis_server.url, folder, **settings) as pool:
        yield pool


# -- headers --------------------------------------------------------------------------------------


async def test_deadlines_that_make_no_sense_are_refused_by_name_and_others_served(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy())
    deadlines = ["500", *SENSELESS]
    numbers = [n for n in range(2 * len(deadlines)) for _ in range(15)]
    answers = await asyncio.gather(
        *(ask(client, pool, n, headers={"x-slo-ttft-ms": deadlines[n // 2]}) for n in numbers)
    )
    served, refused = answers[:30], answers[30:]
    assert codes(served) == {"ok": 30}
    assert {answer.status_code for answer in refused} == {400}
    assert codes(refused) == {"invalid_header": 180}
    assert {answer.json()["error"]["param"] for answer in refused} == {"x-slo-ttft-ms"}
    assert pool.metric("tidegate_tokens_total", tenant="acme", kind="prompt") == 5 * 30


async def test_lower_tiers_that_a_tenant_may_ask_for_are_served_there_and_others_refused(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    def policy_of(*, stop: StopPolicy) -> PolicySnapshot:
        return a_snapshot(
            a_keyed_tenant("acme", tier="silver", allowed_tiers=("bronze",), stop=stop),
            tiers={"gold": 10, "silver": 5, "bronze": 0},
            batching=BatchingRule(max_num_seqs=1),
        )

    done: list[str] = []

    async def asked_for(tier: str, number: int) -> httpx.Response:
        answer = await ask(client, pool, number, headers={"x-tidegate-tier": tier}, output=2)
        done.append(tier)
        return answer

    await asyncio.to_thread(pool.apply, policy_of(stop=StopPolicy.HOLD))
    waiting = []
    for tier in ("bronze", "silver"):
        waiting += [asyncio.create_task(asked_for(tier, number)) for number in range(50)]
        count = len(waiting)
        await until(lambda n=count: pool.total("waiting") == n, "all to be held")  # type: ignore[misc]
    wrong = [tier for tier in ("gold", *SENSELESS) for _ in range(20)]
    refused = await asyncio.gather(*(asked_for(tier, n) for n, tier in enumerate(wrong)))
    assert codes(refused) == {"tier_not_allowed": 140}
    assert {answer.status_code for answer in refused} == {403}
    assert {answer.json()["error"]["param"] for answer in refused} == {"x-tidegate-tier"}
    done.clear()
    await asyncio.to_thread(pool.apply, policy_of(stop=StopPolicy.NONE))
    assert codes(await asyncio.gather(*waiting)) == {"ok": 100}
    # Each engine serves the own tier first, though the lower one had come before.
    assert Counter(done[:40]) == {"silver": 40}
    assert Counter(done[-40:]) == {"bronze": 40}


# -- identities -----------------------------------------------------------------------------------


async def test_a_gateways_requests_count_for_whom_it_names_and_nobody_else_may_name_anybody(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy())
    gateway = {"authorization": f"Bearer {TOKEN}"}

    def reported(tenant: str) -> list[int]:
        return [counters.output_tokens for counters in pool.counters(tenant)]

    def named(name: str, count: int, **who: str) -> list["asyncio.Future[httpx.Response]"]:
        headers = {"x-tidegate-tenant": name, **who}
        return [asyncio.ensure_future(ask(client, pool, n, headers=headers)) for n in range(count)]

    sent = {
        "acme": named("acme", 60, **gateway),
        "zeta": named("zeta", 40, **gateway),
        "stranger": named("stranger", 20, **gateway),
        "by its key": named("zeta", 20),
        "by a guess": named("zeta", 20, authorization=f"Bearer {TOKEN[:-1]}"),
    }
    found = {who: codes(await asyncio.gather(*asked)) for who, asked in sent.items()}
    assert found == {
        "acme": {"ok": 60},
        "zeta": {"ok": 40},
        "stranger": {"invalid_api_key": 20},
        "by its key": {"tenant_header_not_allowed": 20},
        "by a guess": {"tenant_header_not_allowed": 20},
    }
    for tenant, times in (("acme", 60), ("zeta", 40)):
        assert pool.metric("tidegate_tokens_total", tenant=tenant, kind="output") == 5 * times
        await until(lambda t=tenant, n=times: reported(t) == [5 * n // 2] * 2, "reports of both")  # type: ignore[misc]


async def test_a_replaced_key_is_refused_at_once_and_what_it_began_ends_well(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy())
    streams = Streams(client, pool, count=100, output=150)
    await streams.all_begun()
    await asyncio.to_thread(pool.apply, policy(key_digests=(digest_of("sk-new"),)))
    assert pool.metric("tidegate_requests", tenant="acme", state="running") == 100
    old = [ask(client, pool, n) for n in range(100)]
    new = [ask(client, pool, n, tenant="new") for n in range(100)]
    assert codes(await asyncio.gather(*old)) == {"invalid_api_key": 100}
    assert codes(await asyncio.gather(*new)) == {"ok": 100}
    assert await streams.ends() == {"length": 100}
    assert pool.metric("tidegate_tokens_total", tenant="acme", kind="output") == 100 * 150 + 500
