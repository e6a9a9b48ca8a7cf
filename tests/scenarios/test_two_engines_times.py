"""What two engine processes do about time, under hundreds of parallel clients.

Targets and time limits of service levels, and the refusal of who would be served too late.
"""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_policies.rules import BatchingRule, ServiceRule, StopPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.control import until
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
    two_engines,
)

__all__ = ["client", "pool"]

STEP_SECONDS = 0.02
DECODE_SECONDS = 0.002
ENDLESS = 20_000
FEW_PLACES = BatchingRule(max_num_seqs=2)


@pytest.fixture(scope="module")
def processes(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    costs = {
        "TIDEGATE_SIMULATED_STEP_SECONDS": str(STEP_SECONDS),
        "TIDEGATE_SIMULATED_DECODE_SECONDS": str(DECODE_SECONDS),
    }
    with two_engines(redis_server.url, tmp_path_factory.mktemp("engines"), **costs) as pool:
        yield pool


def check_retries(answers: list[httpx.Response]) -> None:
    assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers)


# -- overload -------------------------------------------------------------------------------------


async def test_who_would_be_late_is_shed_and_who_is_served_is_about_in_time(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    rule = ServiceRule(ttft_seconds=3.0, sheds=True)
    acme = a_keyed_tenant("acme", service=rule)
    await asyncio.to_thread(pool.apply, a_snapshot(acme, batching=FEW_PLACES))
    # The engines have seen how long steps take here.
    assert codes([await ask(client, pool, n, output=10) for n in range(8)]) == {"ok": 8}
    before = first_tokens_within(pool, "4.1")
    answers = await asyncio.gather(*(ask(client, pool, n, output=10) for n in range(300)))
    found = codes(answers)
    assert set(found) == {"ok", "shed"}
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == found["shed"]
    check_retries(refused)
    assert pool.metric("tidegate_shed_total", tenant="acme", reason="shed") == found["shed"]
    assert first_tokens_within(pool, "4.1") - before >= 0.9 * found["ok"]


def first_tokens_within(pool: Pool, seconds: str) -> float:
    """Count them by one of the bounds that latencies are counted in."""
    return pool.metric("tidegate_pool_ttft_seconds_bucket", le=seconds)


async def test_tiers_below_0_are_shed_while_higher_ones_would_be_late_and_no_others(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    def policy_of(*, stop: StopPolicy = StopPolicy.NONE) -> PolicySnapshot:
        timed = ServiceRule(ttft_seconds=0.5)
        return a_snapshot(
            a_keyed_tenant("acme", tier="gold", service=timed, stop=stop),
            a_keyed_tenant("calm", tier="standard"),
            a_keyed_tenant("zeta", tier="spare"),
            tiers={"gold": 10, "standard": 0, "spare": -5},
            batching=FEW_PLACES,
        )

    await asyncio.to_thread(pool.apply, policy_of())
    assert codes([await ask(client, pool, n, tenant="zeta") for n in (0, 1)]) == {"ok": 2}
    flood = [asyncio.ensure_future(ask(client, pool, n, output=2000)) for n in range(200)]
    await until(lambda: pool.total("waiting") == 196, "a long queue in both")
    calm = [asyncio.ensure_future(ask(client, pool, n, tenant="calm")) for n in range(20)]
    spare = await asyncio.gather(*(ask(client, pool, n, tenant="zeta") for n in range(100)))
    assert codes(spare) == {"shed": 100}
    check_retries(spare)
    await until(lambda: pool.total("waiting", "calm") == 20, "others to wait in the queue")
    await asyncio.to_thread(pool.apply, policy_of(stop=StopPolicy.CANCEL))
    assert codes(await asyncio.gather(*flood)) == {"tenant_stopped": 200}
    assert codes(await asyncio.gather(*calm)) == {"ok": 20}
    assert codes([await ask(client, pool, n, tenant="zeta") for n in (0, 1)]) == {"ok": 2}


# -- time limits ----------------------------------------------------------------------------------


async def test_what_takes_too_long_is_cut_off_in_time_and_leaves_no_blocks(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    limited = policy(service=ServiceRule(request_timeout_seconds=2.0))
    await asyncio.to_thread(pool.apply, limited)
    began = time.monotonic()
    streams = Streams(client, pool, count=100, output=ENDLESS)
    whole = [asyncio.ensure_future(ask(client, pool, n, output=ENDLESS)) for n in range(100)]
    await streams.all_begun()
    assert await streams.ends() == {"request_timeout": 100}
    answers = await asyncio.gather(*whole)
    assert 2.0 <= time.monotonic() - began < 7.0
    assert codes(answers) == {"request_timeout": 100}
    assert {answer.status_code for answer in answers} == {504}
    cancelled = {"tenant": "acme", "cause": "request_timeout"}
    assert pool.metric("tidegate_cancelled_total", **cancelled) == 200
    assert pool.metric("tidegate_kv_blocks", state="used") == 0


async def test_who_waits_too_long_is_told_so_and_never_prefilled(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    rule = ServiceRule(queue_timeout_seconds=1.0)
    await asyncio.to_thread(pool.apply, policy(max_running=1, service=rule))
    busy = Streams(client, pool, count=2, output=ENDLESS)
    await busy.all_begun()
    prefilled = pool.metric("tidegate_tokens_total", tenant="acme", kind="prompt")
    answers = await asyncio.gather(*(ask(client, pool, n) for n in range(200)))
    assert codes(answers) == {"queue_timeout": 200}
    assert {answer.status_code for answer in answers} == {504}
    check_retries(answers)
    assert pool.metric("tidegate_tokens_total", tenant="acme", kind="prompt") == prefilled
    # Who has its first token is no longer limited by it.
    assert pool.metric("tidegate_requests", tenant="acme", state="running") == 2
    await asyncio.to_thread(pool.apply, policy(stop=StopPolicy.CANCEL))
    assert await busy.ends() == {"tenant_stopped": 2}


# -- time between two tokens ----------------------------------------------------------------------


async def test_a_target_between_tokens_keeps_the_batch_small_while_hundreds_ask(
    pool: Pool, client: httpx.AsyncClient
) -> None:
    most = 32
    target = STEP_SECONDS + most * DECODE_SECONDS
    await asyncio.to_thread(pool.apply, policy(service=ServiceRule(itl_seconds=target)))
    before = steps_beyond(pool, most)
    answers = await asyncio.gather(*(ask(client, pool, n, output=8) for n in range(200)))
    assert codes(answers) == {"ok": 200}
    assert steps_beyond(pool, most) == before


def steps_beyond(pool: Pool, num_requests: int) -> float:
    """Count the steps that had more requests in them, of both engines."""
    steps = "tidegate_step_batch_size"
    within = pool.metric(f"{steps}_bucket", le=f"{num_requests}.0")
    return pool.metric(f"{steps}_count") - within
