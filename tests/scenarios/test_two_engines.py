"""One pool of two engine processes and a real Redis, under hundreds of parallel clients."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import (
    BatchingRule,
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    RateRule,
    StopPolicy,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.control import until
from tidegate_testing.engine_process import an_engine_process
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot
from tidegate_testing.two_engines import (
    Pool,
    Streams,
    ask,
    client,
    codes,
    policy,
    pool,
    stream,
    two_engines,
)

__all__ = ["client", "pool"]

MAX_WAITING = 160


@pytest.fixture(scope="module")
def processes(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("engines")
    with two_engines(redis_server.url, folder, TIDEGATE_MAX_WAITING=str(MAX_WAITING)) as pool:
        yield pool


# -- stops ----------------------------------------------------------------------------------------


async def test_cancel_ends_hundreds_of_streams_with_an_error_and_says_how_long_it_took(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy())
    streams = Streams(client, pool, count=200, output=20_000)
    await streams.all_begun()
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.CANCEL))
    assert await streams.ends() == {"tenant_stopped": 200}
    await until(lambda: len(stop_seconds(pool)) == 2, "the time of the stop")
    assert all(0 <= seconds < 10 for seconds in stop_seconds(pool))
    assert pool.metric("tidegate_stop_seconds", tenant="acme") == sum(stop_seconds(pool))
    assert [report.kv_used_blocks for report in pool.reports()] == [0, 0]
    assert pool.total("cancelled") == 200
    assert codes([await ask(client, pool, 1)]) == {"tenant_stopped": 1}


async def test_hold_and_then_none_loses_nothing(pool: Pool, client: httpx.AsyncClient) -> None:
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.HOLD))
    asked = [asyncio.ensure_future(ask(client, pool, n)) for n in range(100)]
    await until(lambda: pool.total("waiting") == 100, "all to be held")
    assert pool.total("running") == 0
    assert (await ask(client, pool, 1000, tenant="zeta")).status_code == 200
    await asyncio.to_thread(pool.apply, policy())
    answers = await asyncio.gather(*asked)
    assert codes(answers) == {"ok": 100}
    assert sum(answer.json()["usage"]["completion_tokens"] for answer in answers) == 500


async def test_drain_refuses_new_requests_finishes_the_rest_and_says_when_it_was_through(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy(max_running=10))
    streams = Streams(client, pool, count=40, output=200)
    await until(lambda: pool.total("running") + pool.total("waiting") == 40, "all in the engines")
    await asyncio.to_thread(pool.apply, policy(max_running=10, stop=StopPolicy.DRAIN))
    refused = [await ask(client, pool, number) for number in (100, 101)]
    assert [answer.status_code for answer in refused] == [403, 403]
    assert codes(refused) == {"tenant_stopped": 2}
    assert stop_seconds(pool) == []
    assert await streams.ends() == {"length": 40}
    await until(lambda: len(stop_seconds(pool)) == 2, "the time of the stop")
    assert all(seconds > 0.5 for seconds in stop_seconds(pool))  # two rounds of 200 steps, at least


def stop_seconds(pool: Pool) -> list[float]:
    found = [counters.stop_seconds for counters in pool.counters()]
    return [seconds for seconds in found if seconds is not None]


# -- limits ---------------------------------------------------------------------------------------


async def test_no_more_of_a_tenant_run_in_an_engine_than_may_and_all_get_their_turn(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy(max_running=8))
    asked = [asyncio.ensure_future(ask(client, pool, n, output=10)) for n in range(200)]
    most = 0
    while not all(request.done() for request in asked):
        most = max([most, *(counters.running for counters in pool.counters())])
        await asyncio.sleep(0.02)
    assert codes(await asyncio.gather(*asked)) == {"ok": 200}
    assert most <= 8


@pytest.mark.parametrize("limits", [{"max_queued": 20}, {"max_queued_tokens": 100}])
async def test_hundreds_of_requests_of_a_tenant_fill_its_queue_alone(
    pool: Pool, client: httpx.AsyncClient, limits: dict[str, int]
) -> None:
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.HOLD, **limits))
    asked = [asyncio.ensure_future(ask(client, pool, n)) for n in range(200)]
    await until(lambda: sum(request.done() for request in asked) == 160, "refusals")
    # 20 in each engine, of 5 tokens
    await until(lambda: pool.total("waiting") == 40, "the queues in the reports")
    assert (await ask(client, pool, 1000, tenant="zeta")).status_code == 200
    await asyncio.to_thread(pool.apply, policy(**limits))
    answers = await asyncio.gather(*asked)
    assert codes(answers) == {"ok": 40, "tenant_queue_full": 160}
    assert {answer.status_code for answer in answers} == {200, 429}
    await until(lambda: pool.total("shed") == 160, "all refusals in the reports")
    assert pool.metric("tidegate_shed_total", tenant="acme") == 160


async def test_prompts_beyond_the_limit_are_refused_and_outputs_beyond_it_are_cut(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy(max_prompt_tokens=6, max_output_tokens=3))
    requests = [ask(client, pool, n, prompt=5 + n % 4, output=9) for n in range(200)]
    answers = await asyncio.gather(*requests)
    assert codes(answers) == {"ok": 100, "prompt_too_long": 100}
    served = [answer.json() for answer in answers if answer.status_code == 200]
    assert {answer["usage"]["completion_tokens"] for answer in served} == {3}
    assert {answer["choices"][0]["finish_reason"] for answer in served} == {"length"}


async def test_one_tenant_can_not_fill_the_queue_of_all(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.HOLD))
    flood = [asyncio.ensure_future(ask(client, pool, n)) for n in range(400)]
    own_part = MAX_WAITING // 4 // 2
    room = 2 * (MAX_WAITING - own_part)
    await until(lambda: sum(request.done() for request in flood) == 400 - room, "refusals")
    modest = [ask(client, pool, 1000 + n, tenant="zeta") for n in range(2 * own_part)]
    assert codes(await asyncio.gather(*modest)) == {"ok": 2 * own_part}
    await asyncio.to_thread(pool.apply, policy())
    assert codes(await asyncio.gather(*flood)) == {"ok": room, "queue_full": 400 - room}


# -- preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [PreemptionMode.SWAP, PreemptionMode.RECOMPUTE])
async def test_a_changed_preemption_policy_is_obeyed_by_what_runs_already(
    pool: Pool, client: httpx.AsyncClient, mode: PreemptionMode
) -> None:
    def of(preemption: PreemptionRule) -> PolicySnapshot:
        batch = a_keyed_tenant("acme", tier="low", kv_nominal_percent=60, preemption=preemption)
        return a_snapshot(
            batch,
            a_keyed_tenant("zeta", tier="high"),
            tiers={"high": 10, "low": 0},
            batching=BatchingRule(max_num_seqs=1),
        )

    await asyncio.to_thread(pool.apply, of(PreemptionRule(preemptible=False)))
    streams = Streams(client, pool, count=2, output=20_000)
    await streams.all_begun()
    gold = [asyncio.ensure_future(ask(client, pool, 100 + n, tenant="zeta")) for n in range(2)]
    await until(lambda: pool.total("waiting", "zeta") == 2, "gold to wait")
    assert not any(request.done() for request in gold)
    before = pool.metric("tidegate_preemptions_total", tenant="acme", mode=mode.lower())
    eager = PreemptionRule(preemptible=True, mode=mode, min_quantum_tokens=0)
    await asyncio.to_thread(pool.apply, of(eager))
    assert codes(await asyncio.gather(*gold)) == {"ok": 2}
    taken = pool.metric("tidegate_preemptions_total", tenant="acme", mode=mode.lower()) - before
    assert taken == 2
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.CANCEL))
    assert await streams.ends() == {"tenant_stopped": 2}


@pytest.mark.parametrize(
    ("allowed", "before", "after"),
    [
        (0, PreemptionRule(min_quantum_tokens=1_000_000), PreemptionRule(min_quantum_tokens=0)),
        (
            1,
            PreemptionRule(min_quantum_tokens=0, max_preemptions=1),
            PreemptionRule(min_quantum_tokens=0, max_preemptions=2),
        ),
    ],
    ids=["quantum", "cap"],
)
async def test_a_changed_quantum_or_cap_counts_for_what_runs_already(
    pool: Pool,
    client: httpx.AsyncClient,
    allowed: int,
    before: PreemptionRule,
    after: PreemptionRule,
) -> None:
    def of(rule: PreemptionRule) -> PolicySnapshot:
        return a_snapshot(
            a_keyed_tenant("acme", tier="low", preemption=rule),
            a_keyed_tenant("zeta", tier="high"),
            tiers={"high": 10, "low": 0},
            batching=BatchingRule(max_num_seqs=1),
        )

    await asyncio.to_thread(pool.apply, of(before))
    streams = Streams(client, pool, count=2, output=20_000)
    await streams.all_begun()
    for _ in range(allowed):
        assert codes([await ask(client, pool, n, tenant="zeta") for n in (0, 1)]) == {"ok": 2}
    gold = [asyncio.ensure_future(ask(client, pool, n, tenant="zeta")) for n in range(100)]
    await until(lambda: pool.total("waiting", "zeta") == 100, "gold to wait")
    assert preempted(pool, "displaced") == 2 * allowed
    await asyncio.to_thread(pool.apply, of(after))
    assert codes(await asyncio.gather(*gold)) == {"ok": 100}
    assert preempted(pool, "displaced") == 2 * (allowed + 1)
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.CANCEL))
    assert await streams.ends() == {"tenant_stopped": 2}


async def test_an_owner_that_is_to_reclaim_from_now_on_gets_its_blocks_back(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    def of(*, reclaims: bool) -> PolicySnapshot:
        rule = PreemptionRule(reclaims=reclaims)
        owner = a_keyed_tenant("zeta", kv_nominal_percent=60, preemption=rule)
        return a_snapshot(a_keyed_tenant("acme"), owner, kv_estimate=KvEstimate.OPTIMISTIC)

    await asyncio.to_thread(pool.apply, of(reclaims=False))
    borrowers = Streams(client, pool, count=8, prompt=12_000, output=20_000)  # 3000 of 4096 blocks
    await borrowers.all_begun()
    owned = [
        asyncio.ensure_future(ask(client, pool, n, tenant="zeta", prompt=20_000)) for n in range(2)
    ]
    await until(lambda: pool.total("waiting", "zeta") == 2, "the owner to wait")
    assert preempted(pool, "reclaimed") == 0
    await asyncio.to_thread(pool.apply, of(reclaims=True))
    assert codes(await asyncio.gather(*owned)) == {"ok": 2}
    assert preempted(pool, "reclaimed") >= 2
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.CANCEL))
    assert await borrowers.ends() == {"tenant_stopped": 8}


def preempted(pool: Pool, cause: str) -> float:
    return pool.metric("tidegate_preemptions_total", tenant="acme", cause=cause)


# -- usage ----------------------------------------------------------------------------------------


async def test_what_answers_say_was_used_is_what_engines_count_and_report(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    await asyncio.to_thread(pool.apply, policy())
    prefilled = pool.metric("tidegate_step_tokens_sum", kind="prefill")
    said = {"acme": Counter[str](), "zeta": Counter[str]()}

    def reported(tenant: str) -> dict[str, float]:
        return {kind: pool.total(f"{kind}_tokens", tenant) for kind in said[tenant]}

    for _ in range(2):  # the second time prompts are known
        for tenant, usage in said.items():
            requests = [
                ask(client, pool, 500 + n, tenant=tenant, prompt=40, output=3 + n % 5)
                for n in range(50)
            ]
            for answer in await asyncio.gather(*requests):
                found = answer.json()["usage"]
                usage["output"] += found["completion_tokens"]
                usage["cached"] += found["prompt_tokens_details"]["cached_tokens"]
                usage["prompt"] += found["prompt_tokens"]
    computed = 0.0
    for tenant, usage in said.items():
        usage["prompt"] -= usage["cached"]
        assert usage["cached"] == 50 * 32
        counted = {
            kind: pool.metric("tidegate_tokens_total", tenant=tenant, kind=kind) for kind in usage
        }
        assert counted == usage
        computed += counted["prompt"]
        await until(lambda t=tenant: reported(t) == said[t], "the last report")  # type: ignore[misc]
        kv_seconds = pool.metric("tidegate_kv_seconds_total", tenant=tenant)
        assert kv_seconds > 0
        assert pool.total("kv_seconds", tenant) == pytest.approx(kv_seconds)
    assert pool.metric("tidegate_step_tokens_sum", kind="prefill") - prefilled == computed


# -- rates ----------------------------------------------------------------------------------------


async def test_of_the_last_percent_of_a_budget_hundreds_of_requests_get_no_more_than_there_is(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    rule = RateRule(tokens_per_minute=600, burst_percent=1000)
    await asyncio.to_thread(pool.apply, policy(rate=rule))
    began = time.monotonic()
    assert (await ask(client, pool, 2000, prompt=5935, output=5)).status_code == 200
    answers = await asyncio.gather(*(ask(client, pool, n) for n in range(200)))
    elapsed = time.monotonic() - began
    found = codes(answers)
    assert set(found) == {"ok", "rate_limited"}
    lease = 10  # tokens: those of a second
    assert 10 * found["ok"] <= 60 + 10 * elapsed + 2 * lease


async def test_what_a_killed_engine_had_leased_is_back_within_ten_seconds(
    processes: Pool, client: httpx.AsyncClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = RateRule(tokens_per_minute=60, burst_percent=500)
    processes.apply(a_snapshot(a_keyed_tenant("leaser", rate=rule)))
    with an_engine_process(
        processes.publisher,
        tmp_path_factory.mktemp("doomed"),
        TIDEGATE_POD_NAME="engine-doomed",
        TIDEGATE_SIMULATED_STEP_SECONDS="0.5",
        TIDEGATE_KV_BLOCKS="64",
    ) as doomed:
        await asyncio.to_thread(doomed.wait_until_ready)
        alone = Pool(processes.publisher, (doomed, doomed))
        opened = asyncio.Event()
        # Sets at least 128 tokens of 300 aside.
        streaming = asyncio.create_task(
            stream(client, alone, 1, began=opened.set, output=250, tenant="leaser")
        )
        async with asyncio.timeout(30):
            await opened.wait()
        doomed.process.kill()
        killed_at = time.monotonic()
        await asyncio.wait({streaming})
        assert isinstance(streaming.exception(), httpx.TransportError)

    async def asked() -> Counter[str]:
        return codes([await ask(client, processes, 2100, prompt=215, tenant="leaser")])

    assert await asked() == {"rate_limited": 1}
    while await asked() != {"ok": 1}:
        assert time.monotonic() - killed_at < 10
        await asyncio.sleep(0.2)
