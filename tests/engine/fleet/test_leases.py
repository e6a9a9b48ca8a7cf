"""Budget leased from real Redis by several engines at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.fleet.rates import FleetRates, Reservation, Shortage
from tidegate_policies.rules import RateRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.rates import a_fleet, renew, taken


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, socket_timeout=2)
    yield client
    await client.aclose()


async def test_engines_share_one_budget(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one"), fleet.bucket("other")
    got = await taken(one, 10, times=40) + await taken(other, 10, times=40)
    assert got == 60
    await fleet.wait(1)
    assert await taken(one, 10, times=5) + await taken(other, 10, times=5) == 1


async def test_parallel_requests_on_the_last_of_a_budget_never_get_more(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    engines = [fleet.bucket(f"engine-{n}") for n in range(4)]
    assert await engines[0].reserve(594) == 0
    waits = await asyncio.gather(*(engines[n % 4].reserve(1) for n in range(200)))
    assert waits.count(0.0) == 6


async def test_steady_traffic_gets_the_limit_and_no_more(redis: Redis) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=60)
    engines = [fleet.bucket("one"), fleet.bucket("other")]
    got = 0
    for tick in range(600):
        await fleet.wait(0.1)
        got += await taken(engines[tick % 2], 3, times=1) * 3
        if tick % 20 == 19:
            await renew(engines)
    assert 600 <= got <= 660  # what flowed in, and at most the bucket's depth


async def test_what_was_reserved_and_not_used_comes_back(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.bucket("one"), fleet.bucket("other")
    assert await one.reserve(600) == 0
    assert await other.reserve(100) > 0
    one.give_back(500)
    await one.renew()
    assert await other.reserve(100) > 0  # an engine keeps what it has just used
    await one.renew()
    assert await other.reserve(500) == 0


async def test_what_comes_back_late_makes_no_burst_of_more_than_the_depth_and_a_lease(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    reserved = 0
    for _ in range(100):
        assert await one.reserve(50) == 0
        reserved += 50
        await one.renew()
        await fleet.wait(10)
    one.give_back(reserved)
    assert await taken(one, 10, times=200) * 10 <= 600 + 10 + 50
    await one.renew()
    assert await fleet.level() <= 0


async def test_what_was_used_beyond_is_debt(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    assert await one.reserve(600) == 0
    one.give_back(-300)
    await one.renew()
    await fleet.wait(29)
    assert await one.reserve(1) > 0
    await fleet.wait(2)
    assert await one.reserve(1) == 0


async def test_who_is_refused_learns_when_there_is_enough(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    assert await one.reserve(600) == 0
    wait = await one.reserve(50)
    assert wait == pytest.approx(5)
    await fleet.wait(wait + 0.001)
    assert await one.reserve(50) == 0


async def test_the_lease_of_a_dead_engine_returns(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    dead, other = fleet.bucket("dead"), fleet.bucket("other")
    assert await dead.reserve(300) == 0
    assert await other.reserve(300) == 0
    assert await other.reserve(300) > 0
    await fleet.wait(6.5)
    assert await other.reserve(366) > 0  # 300 returned, 65 flowed in
    assert await other.reserve(365) == 0


async def test_the_lease_of_a_dead_engine_returns_in_time_though_the_clock_was_set_back(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    dead, other = fleet.bucket("dead"), fleet.bucket("other")
    assert await dead.reserve(300) == 0
    assert await other.reserve(300) == 0
    await fleet.jump(-3600)
    assert await other.reserve(300) > 0
    await fleet.wait(6.5)
    assert await other.reserve(365) == 0


async def test_a_request_beyond_the_depth_passes_and_leaves_debt(redis: Redis) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=100)
    one = fleet.bucket("one")
    assert await one.reserve(300) == 0
    assert await one.reserve(1) == pytest.approx(20.1)


async def test_a_clock_that_jumps_gives_at_most_the_depth(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.bucket("one")
    assert await one.reserve(600) == 0
    await fleet.jump(-990)
    assert await one.reserve(1) > 0
    await fleet.jump(1e9)
    assert await taken(one, 100, times=10) == 6


# -- over all limits ----------------------------------------------------------------------------


def limited(**rule: int) -> PolicySnapshot:
    return a_snapshot(a_tenant(rate=RateRule(**rule)))


async def new_rates(redis: Redis) -> FleetRates:
    return (await a_fleet(redis)).rates("one")


async def taken_in_all(rates: FleetRates, tokens: float) -> float:
    """Reserve until it is refused."""
    total = 0.0
    while isinstance(await rates.reserve("acme", tokens), Reservation):
        total += tokens
    return total


async def test_requests_and_tokens_are_limited_together(redis: Redis) -> None:
    rates = await new_rates(redis)
    rule = RateRule(requests_per_minute=3, tokens_per_minute=6000)
    rates.use_policy(a_snapshot(a_tenant(rate=rule), a_tenant("free")))
    first = await rates.reserve("acme", 5000)
    assert isinstance(first, Reservation)
    short = await rates.reserve("acme", 5000)
    assert isinstance(short, Shortage)
    assert (short.unit, short.per_minute) == ("tokens", 6000)
    rates.settle(first, used_tokens=1000)
    assert isinstance(await rates.reserve("acme", 4000), Reservation)
    assert isinstance(await rates.reserve("acme", 10), Reservation)
    last = await rates.reserve("acme", 10)
    assert isinstance(last, Shortage)
    assert last.unit == "requests"
    assert isinstance(await rates.reserve("free", 1e9), Reservation)


async def test_leases_are_renewed_over_a_few_connections(redis_server: RedisServer) -> None:
    redis = Redis.from_url(redis_server.url, max_connections=10, socket_timeout=2)
    rates = await new_rates(redis)
    rule = RateRule(requests_per_minute=600, tokens_per_minute=6000)
    tenants = [f"tenant-{number}" for number in range(60)]
    rates.use_policy(a_snapshot(*(a_tenant(name, rate=rule) for name in tenants)))
    for name in tenants:
        assert isinstance(await rates.reserve(name, 10), Reservation)
    await rates.renew()
    assert not rates.is_alone
    await redis.aclose()


async def test_a_lowered_limit_is_obeyed_at_once_also_by_what_is_leased(redis: Redis) -> None:
    rates = await new_rates(redis)
    rates.use_policy(limited(tokens_per_minute=600_000))
    assert isinstance(await rates.reserve("acme", 10), Reservation)
    rates.use_policy(limited(tokens_per_minute=60))
    assert await taken_in_all(rates, 20) == 60
    rates.use_policy(a_snapshot(a_tenant()))
    assert isinstance(await rates.reserve("acme", 1e6), Reservation)


async def test_a_new_limit_owes_nothing_for_what_was_never_taken_from_it(redis: Redis) -> None:
    rates = await new_rates(redis)
    rates.use_policy(a_snapshot(a_tenant()))
    before = [await rates.reserve("acme", 5000) for _ in range(3)]
    rates.use_policy(limited(tokens_per_minute=60))
    assert await taken_in_all(rates, 60) == 60
    for reservation in before:
        assert isinstance(reservation, Reservation)
        rates.settle(reservation, used_tokens=0)
    assert await taken_in_all(rates, 1) == 0


async def test_what_was_spent_of_a_limit_that_goes_is_told_once_it_is_back(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    rates = fleet.rates("one")
    for _ in range(6):
        rates.use_policy(limited(tokens_per_minute=600))
        assert isinstance(await rates.reserve("acme", 100), Reservation)
        rates.use_policy(a_snapshot())
    await fleet.wait(6.5)  # what was leased, and never spent as far as is known, returns
    rates.use_policy(limited(tokens_per_minute=600))
    assert await taken_in_all(rates, 1) == 65


async def test_a_limit_that_goes_and_comes_back_knows_what_was_spent(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    rates = fleet.rates("one")
    total = 0.0
    for is_settled in (False, False, True, True):
        rates.use_policy(limited(tokens_per_minute=600))
        total += await taken_in_all(rates, 100)
        rates.use_policy(a_snapshot())
        if is_settled:  # as it stays away for longer
            await rates.renew()
            await rates.renew()
    assert total == 600
    rates.use_policy(limited(tokens_per_minute=600))
    await fleet.wait(60)
    assert await taken_in_all(rates, 100) == 600
