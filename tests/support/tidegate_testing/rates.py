"""Engines of one pool that lease from a real Redis, on clocks of the test's."""

from collections.abc import Sequence
from itertools import count

from redis.asyncio import Redis

from tidegate_engine.fleet.bucket import LocalBucket
from tidegate_engine.fleet.bucket_script import COUNT, LEASE, Ask, BucketLimit, BucketStore, Lease
from tidegate_engine.fleet.rates import EXPIRY_SECONDS, FleetRates
from tidegate_engine.fleet.size import FleetSize

_pools = count(1)


def _timed(script: str) -> str:
    """Take time as the test says, where Redis would look at its clock."""
    return script.replace("redis.call('TIME')", "{redis.call('GET', 'now'), 0}")


class Store(BucketStore):
    """A way to Redis that may fail.

    Attributes:
        is_cut_off: Redis isn't reached.
        loses_answers: It is, and the answers are lost.
        num_calls: Attempts to lease.
        num_answers: Those that had an answer.
    """

    def __init__(self, redis: Redis, *, pool: str, engine: str) -> None:
        super().__init__(
            redis,
            pool=pool,
            engine=engine,
            expiry_seconds=EXPIRY_SECONDS,
            lease_script=_timed(LEASE),
            count_script=_timed(COUNT),
        )
        self.is_cut_off = False
        self.loses_answers = False
        self.num_calls = 0
        self.num_answers = 0

    async def count_engines(self) -> int:
        if self.is_cut_off:
            raise ConnectionError
        return await super().count_engines()

    async def lease(self, tenant: str, unit: str, limit: BucketLimit, ask: Ask) -> Lease:
        self.num_calls += 1
        if self.is_cut_off:
            raise ConnectionError
        answer = await super().lease(tenant, unit, limit, ask)
        if self.loses_answers:
            raise ConnectionError
        self.num_answers += 1
        return answer


class Fleet:
    """A new pool with a limit on the tokens of the tenant `acme`.

    Attributes:
        elapsed: What engines' clocks say, which never go back.
        stores: By engine.
    """

    def __init__(self, redis: Redis, limit: BucketLimit) -> None:
        self.redis = redis
        self.limit = limit
        self.elapsed = 0.0
        self.stores: dict[str, Store] = {}
        self._pool = f"rates/{next(_pools)}"
        self._now = 1000.0

    async def wait(self, seconds: float) -> None:
        """Let time pass, for Redis and engines."""
        self.elapsed += seconds
        await self.jump(seconds)

    async def jump(self, seconds: float) -> None:
        """Have the clock of Redis set, by so much."""
        self._now += seconds
        await self.redis.set("now", repr(self._now))

    def bucket(self, engine: str, *, num_engines: int = 1) -> LocalBucket:
        """Return the limit in a new engine that knows of so many."""
        size = FleetSize()
        size.num_engines = num_engines
        return LocalBucket(
            "acme",
            "tokens",
            self.limit,
            store=self._store(engine),
            size=size,
            clock=lambda: self.elapsed,
        )

    def rates(self, engine: str, size: FleetSize | None = None) -> FleetRates:
        """Return all limits in a new engine; there are none before it has a policy."""
        return FleetRates(self._store(engine), clock=lambda: self.elapsed, size=size)

    async def fill_up(self, per_minute: float, depth: float) -> None:
        """Have the pool's bucket filled up by a limit."""
        limit = BucketLimit(per_minute=per_minute, depth=depth)
        store = Store(self.redis, pool=self._pool, engine="nobody")
        ask = Ask(lease=store.new_lease(), spent=0.0, told=0.0)
        await store.lease("acme", "tokens", limit, ask)

    async def level(self) -> float:
        """Return what is in the pool's bucket, and leased by nobody."""
        level = await self.redis.hget(f"tidegate:{self._pool}:rate:tokens:acme", "level")
        return float(level or 0)

    async def forget_all(self) -> None:
        """Empty Redis, of all that this pool has there."""
        await self.redis.delete(*await self.redis.keys(f"tidegate:{self._pool}:*"))

    def _store(self, engine: str) -> Store:
        self.stores[engine] = Store(self.redis, pool=self._pool, engine=engine)
        return self.stores[engine]


async def a_fleet(redis: Redis, *, per_minute: float = 600, depth: float = 600) -> Fleet:
    fleet = Fleet(redis, BucketLimit(per_minute=per_minute, depth=depth))
    await fleet.jump(0)
    return fleet


async def taken(bucket: LocalBucket, amount: float, *, times: int) -> int:
    """Reserve again and again; return how often there was enough."""
    return [await bucket.reserve(amount) for _ in range(times)].count(0.0)


async def renew(engines: Sequence[LocalBucket | FleetRates]) -> None:
    """Let one round pass in all of them, one after the other."""
    for engine in engines:
        await engine.renew()
