"""Two engine processes and a real Redis: what the engines of a pool tell each other counts."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import BatchingRule, PreemptionMode, PreemptionRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.control import until
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot
from tidegate_testing.two_engines import Pool, ask, client, codes, pool, two_engines

__all__ = ["client", "pool"]


@pytest.fixture(scope="module")
def processes(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    slow = {"TIDEGATE_SIMULATED_STEP_SECONDS": "0.02", "TIDEGATE_MAX_NUM_SEQS": "4"}
    with two_engines(redis_server.url, tmp_path_factory.mktemp("engines"), **slow) as pool:
        yield pool


def output_tokens(pool: Pool, tenant: str) -> float:
    return pool.metric("tidegate_tokens_total", tenant=tenant, kind="output")


async def test_who_sends_all_to_one_engine_and_who_spreads_are_served_by_weight(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    def weighed(stop: StopPolicy = StopPolicy.NONE) -> PolicySnapshot:
        return a_snapshot(
            a_keyed_tenant("spread", weight=200, stop=stop),
            a_keyed_tenant("single", weight=100, stop=stop),
        )

    await asyncio.to_thread(pool.apply, weighed())
    spread = [
        asyncio.ensure_future(ask(client, pool, number, output=20, tenant="spread"))
        for number in range(300)
    ]
    single = [
        asyncio.ensure_future(ask(client, pool, 2 * number, output=20, tenant="single"))
        for number in range(150)
    ]
    await until(
        lambda: output_tokens(pool, "single") + output_tokens(pool, "spread") > 3000,
        "service of both",
    )
    tokens = {tenant: output_tokens(pool, tenant) for tenant in ("spread", "single")}
    assert min(pool.total("waiting", tenant) for tenant in tokens) > 0
    # Engines that know nothing of each other would give it a third of the first one, a sixth.
    assert tokens["single"] / sum(tokens.values()) == pytest.approx(1 / 3, abs=0.06)
    # Clients that hang up while they connect leave sockets open.
    await asyncio.to_thread(pool.apply, weighed(StopPolicy.CANCEL))
    assert set(codes(await asyncio.gather(*spread, *single))) == {"ok", "tenant_stopped"}


async def test_preemptions_and_what_they_cost_are_the_same_in_metrics_and_in_reports(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    eager = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)
    policy = a_snapshot(
        a_keyed_tenant("batch", tier="low", preemption=eager),
        a_keyed_tenant("gold", tier="high"),
        tiers={"high": 10, "low": 0},
        batching=BatchingRule(max_num_seqs=1),
    )
    await asyncio.to_thread(pool.apply, policy)
    batch = [
        asyncio.ensure_future(ask(client, pool, n, output=100, tenant="batch")) for n in range(2)
    ]
    await until(lambda: pool.total("running", "batch") == 2, "one that runs in each engine")
    gold = [ask(client, pool, n, tenant="gold") for n in range(2)]
    answers = await asyncio.gather(*batch, *gold)
    assert [answer.status_code for answer in answers] == [200] * 4
    preempted = pool.metric("tidegate_preemptions_total", tenant="batch")
    recomputed = pool.metric("tidegate_tokens_total", tenant="batch", kind="recomputed")
    assert preempted == 2
    assert recomputed > 0
    await until(lambda: pool.total("preempted", "batch") == preempted, "them in the reports")
    await until(lambda: pool.total("running", "batch") == 0, "the last report")
    assert pool.total("recomputed_tokens", "batch") == recomputed
