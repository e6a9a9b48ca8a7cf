"""Budget leased from real Redis by several engines at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.fleet.bucket import LocalBucket
from tidegate_engine.fleet.bucket_script import LEASE, BucketLimit, BucketStore, Lease
from tidegate_engine.fleet.rates import FleetRates, Reservation, Shortage
from tidegate_policies.rules import RateRule
from tidegate_testing.policies import a_snapshot, a_tenant

MINUTE = 60.0
_pools = count(1)

# Time as the test says, where Redis would look at its clock.
TIMED = LEASE.replace("redis.call('TIME')", "{redis.call('GET', 'now'), 0}")


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_server.url, socket_timeout=2)
    yield client
    await client.aclose()


class Fleet:
    """Engines of one new pool, on a clock of the test's."""

    def __init__(self, redis: Redis, limit: BucketLimit, *, expiry: float = 6.0) -> None:
        self.redis = redis
        self.limit = limit
        self.now = 1000.0
        self.pool = f"rates/{next(_pools)}"
        self._expiry = expiry
        self._gone_back = 0.0

    async def set_time(self, now: float) -> None:
        self._gone_back += max(0.0, self.now - now)
        self.now = now
        await self.redis.set("now", repr(now))

    def store(self, engine: str) -> BucketStore:
        return BucketStore(
            self.redis, pool=self.pool, engine=engine, expiry_seconds=self._expiry, script=TIMED
        )

    def engine(self, name: str) -> LocalBucket:
        return LocalBucket(
            "acme",
            "tokens",
            self.limit,
            store=self.store(name),
            clock=lambda: self.now + self._gone_back,  # an engine's own never goes back
        )


class NoStore(BucketStore):
    """A Redis that can't be asked."""

    def __init__(self, num_engines: int = 1) -> None:
        self.num_engines = num_engines
        self.num_calls = 0

    async def lease(self, *_: object, **__: object) -> Lease:
        self.num_calls += 1
        raise ConnectionError


async def a_fleet(redis: Redis, *, per_minute: float = 600, depth: float = 600) -> Fleet:
    fleet = Fleet(redis, BucketLimit(per_minute=per_minute, depth=depth))
    await fleet.set_time(1000.0)
    return fleet


async def taken(bucket: LocalBucket, amount: float, *, times: int) -> int:
    return [await bucket.reserve(amount) for _ in range(times)].count(0.0)


async def test_engines_share_one_budget(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.engine("one"), fleet.engine("other")
    got = await taken(one, 10, times=40) + await taken(other, 10, times=40)
    assert got == 60
    await fleet.set_time(1001.0)
    assert await taken(one, 10, times=5) + await taken(other, 10, times=5) == 1


async def test_parallel_requests_on_the_last_of_a_budget_never_get_more(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    engines = [fleet.engine(f"engine-{n}") for n in range(4)]
    assert await engines[0].reserve(594) == 0
    waits = await asyncio.gather(*(engines[n % 4].reserve(1) for n in range(200)))
    assert waits.count(0.0) == 6


async def test_steady_traffic_gets_the_limit_and_no_more(redis: Redis) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=60)
    engines = [fleet.engine("one"), fleet.engine("other")]
    got = 0
    for tick in range(600):
        await fleet.set_time(1000.0 + tick / 10)
        got += await taken(engines[tick % 2], 3, times=1) * 3
        if tick % 20 == 19:
            for engine in engines:
                await engine.renew()
    assert 600 <= got <= 660  # what flowed in, and at most the bucket's depth


async def test_what_was_reserved_and_not_used_comes_back(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.engine("one"), fleet.engine("other")
    assert await one.reserve(600) == 0
    assert await other.reserve(100) > 0
    one.give_back(500)
    await one.renew()
    assert await other.reserve(100) > 0  # an engine keeps what it has just used
    await one.renew()
    assert await other.reserve(500) == 0


async def test_what_was_used_beyond_is_debt(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.engine("one")
    assert await one.reserve(600) == 0
    one.give_back(-300)
    await one.renew()
    await fleet.set_time(1029.0)
    assert await one.reserve(1) > 0
    await fleet.set_time(1031.0)
    assert await one.reserve(1) == 0


async def test_who_is_refused_learns_when_there_is_enough(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.engine("one")
    assert await one.reserve(600) == 0
    wait = await one.reserve(50)
    assert wait == pytest.approx(5)
    await fleet.set_time(1000.0 + wait + 0.001)
    assert await one.reserve(50) == 0


async def test_the_lease_of_a_dead_engine_returns(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    dead, other = fleet.engine("dead"), fleet.engine("other")
    assert await dead.reserve(300) == 0
    assert await other.reserve(300) == 0
    dead.give_back(300)
    assert await other.reserve(300) > 0
    await fleet.set_time(1006.5)
    assert await other.reserve(366) > 0  # 300 returned, 65 flowed in
    assert await other.reserve(365) == 0


async def test_a_request_beyond_the_depth_passes_and_leaves_debt(redis: Redis) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=100)
    one = fleet.engine("one")
    assert await one.reserve(300) == 0
    assert await one.reserve(1) == pytest.approx(20.1)


async def test_a_clock_that_jumps_gives_at_most_the_depth(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one = fleet.engine("one")
    assert await one.reserve(600) == 0
    await fleet.set_time(10.0)
    assert await one.reserve(1) > 0
    await fleet.set_time(1e9)
    assert await taken(one, 100, times=10) == 6


async def test_without_redis_an_engine_has_its_part_and_pays_later(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, other = fleet.engine("one"), fleet.engine("other")
    for engine in (one, other):
        assert await engine.reserve(300) == 0
    await one.renew()  # and learn that there are two
    one._store = NoStore(num_engines=one._store.num_engines)
    assert await one.reserve(1) > 0
    was_alone = [one.is_alone]
    fleet.now += 10.0
    assert await taken(one, 10, times=20) == 5  # 10 s of half the limit
    one._store = fleet.store("one")
    await one.renew()
    assert [*was_alone, one.is_alone] == [True, False]
    await fleet.set_time(1001.0)
    assert await other.reserve(1) == pytest.approx(4.1)  # 50 used without asking, 10 flowed in


async def test_without_redis_a_request_beyond_the_part_of_an_engine_passes_now_and_then(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis, per_minute=600, depth=600)
    one = fleet.engine("one")
    one._store = NoStore(num_engines=4)
    passed = 0
    for _ in range(120):
        fleet.now += 1.0
        passed += await one.reserve(200) == 0
    assert passed == pytest.approx(120 * 2.5 / 200, abs=1)  # a quarter of 10 a second


async def test_without_redis_nobody_waits_for_it_but_the_first(redis: Redis) -> None:
    fleet = await a_fleet(redis)
    one, store = fleet.engine("one"), NoStore()
    one._store = store
    waits = await asyncio.gather(*(one.reserve(10) for _ in range(20)))
    assert min(waits) > 0
    assert store.num_calls == 1
    await one.renew()
    assert store.num_calls == 2


async def test_a_caller_that_leaves_while_redis_is_asked_takes_nothing_with_it(
    redis: Redis,
) -> None:
    fleet = await a_fleet(redis)
    one = fleet.engine("one")
    assert await one.reserve(590) == 0
    asked = asyncio.create_task(one.reserve(500))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait({asked})
    assert await one.reserve(500) > 0


# -- over all limits ----------------------------------------------------------------------------


async def test_requests_and_tokens_are_limited_together(redis: Redis) -> None:
    store = BucketStore(redis, pool=f"rates/{next(_pools)}", engine="one", expiry_seconds=6)
    rates = FleetRates(store, clock=lambda: 0.0)
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
    store = BucketStore(redis, pool=f"rates/{next(_pools)}", engine="one", expiry_seconds=6)
    rates = FleetRates(store, clock=lambda: 0.0)
    rule = RateRule(requests_per_minute=600, tokens_per_minute=6000)
    tenants = [f"tenant-{number}" for number in range(60)]
    rates.use_policy(a_snapshot(*(a_tenant(name, rate=rule) for name in tenants)))
    for name in tenants:
        assert isinstance(await rates.reserve(name, 10), Reservation)
    await rates.renew()
    assert not rates.is_alone
    await redis.aclose()


async def test_a_lowered_limit_is_obeyed_at_once(redis: Redis) -> None:
    store = BucketStore(redis, pool=f"rates/{next(_pools)}", engine="one", expiry_seconds=6)
    rates = FleetRates(store, clock=lambda: 0.0)
    rates.use_policy(a_snapshot(a_tenant(rate=RateRule(tokens_per_minute=6000))))
    assert isinstance(await rates.reserve("acme", 10), Reservation)
    rates.use_policy(a_snapshot(a_tenant(rate=RateRule(tokens_per_minute=60))))
    assert isinstance(await rates.reserve("acme", 200), Shortage)
    rates.use_policy(a_snapshot(a_tenant()))
    assert isinstance(await rates.reserve("acme", 1e6), Reservation)


# -- whatever happens ---------------------------------------------------------------------------

PER_MINUTE, DEPTH, EXPIRY = 600.0, 300.0, 6.0
MOST_LEASED = 60.0  # requests need less, and a chunk is a second's worth

events = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 2), st.integers(1, 50)),
        st.tuples(st.just("settle"), st.integers(0, 2), st.integers(0, 50)),
        st.tuples(st.just("renew"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("crash"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("cut off"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("reconnect"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 8), st.just(0)),
        st.tuples(st.just("jump back"), st.integers(0, 100), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=events)
async def test_never_more_is_used_than_flowed_in_and_a_lease_for_every_engine_lost(
    redis_server: RedisServer, events: list[tuple[str, int, int]]
) -> None:
    redis = Redis.from_url(redis_server.url, socket_timeout=2)
    try:
        await hold_to_the_budget(redis, events)
    finally:
        await redis.aclose()


async def hold_to_the_budget(redis: Redis, events: list[tuple[str, int, int]]) -> None:
    fleet = await a_fleet(redis, per_minute=PER_MINUTE, depth=DEPTH)
    names = count(1)
    new: Callable[[], LocalBucket] = lambda: fleet.engine(f"engine-{next(names)}")  # noqa: E731
    engines = [new() for _ in range(3)]
    used, flowed, losses = 0.0, DEPTH, 0
    stores: dict[int, BucketStore] = {}  # of the engines that are cut off
    reserved: list[list[float]] = [[], [], []]
    for kind, which, amount in events:
        if kind == "reserve" and await engines[which].reserve(amount) == 0:
            used += amount
            reserved[which].append(amount)
        elif kind == "settle" and reserved[which]:
            unused = min(amount, reserved[which].pop())
            engines[which].give_back(unused)
            used -= unused
        elif kind == "renew":
            await engines[which].renew()
        elif kind == "crash":
            engines[which], reserved[which] = new(), []
            stores.pop(which, None)
            losses += 1
        elif kind == "cut off" and which not in stores:
            stores[which] = engines[which]._store
            engines[which]._store = NoStore(stores[which].num_engines)
            losses += 1  # the pool takes back what it has leased
        elif kind == "reconnect" and which in stores:
            engines[which]._store = stores.pop(which)
            await engines[which].renew()
        elif kind == "wait":
            await fleet.set_time(fleet.now + which)
            flowed += which * PER_MINUTE / MINUTE
            parts = (1 / store.num_engines for store in stores.values())
            flowed += which * PER_MINUTE / MINUTE * sum(parts)
        elif kind == "jump back":
            await fleet.set_time(fleet.now - which)
            flowed += which * PER_MINUTE / MINUTE  # until the clock is there again, it stands
        assert used <= flowed + losses * MOST_LEASED + 1e-6
