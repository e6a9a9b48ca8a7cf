"""The rate limits of all tenants, as this engine takes part in them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from tidegate_engine.fleet.bucket import LocalBucket
from tidegate_engine.fleet.bucket_script import BucketLimit, BucketStore
from tidegate_engine.fleet.size import FleetSize
from tidegate_policies.rules import RateRule
from tidegate_policies.snapshot import PolicySnapshot

TOKENS, REQUESTS = "tokens", "requests"

EXPIRY_SECONDS = 6.0
"""The lease of an engine that was silent for so long returns to the pool, and it isn't counted."""

RENEW_SECONDS = 2.0
"""How often leases are renewed, and those without use given back."""

_RENEWED_AT_ONCE = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A limit that a request doesn't fit in now.

    Attributes:
        unit: `tokens` or `requests`.
        per_minute: The limit.
        wait_seconds: When there may be enough.
    """

    unit: str
    per_minute: float
    wait_seconds: float


@dataclass(slots=True)
class Reservation:
    """What was set aside for one request.

    Attributes:
        tokens: Uncached prompt tokens and expected output tokens.
        bucket: They were taken from it; None = from none, as the tenant had no limit.
    """

    tenant: str
    tokens: float
    bucket: LocalBucket | None = None


class FleetRates:
    """Reserves, settles and renews, for every tenant with a limit."""

    def __init__(
        self,
        store: BucketStore | None,
        *,
        clock: Callable[[], float],
        size: FleetSize | None = None,
    ) -> None:
        """Begin without limits; `run` keeps leases alive.

        Args:
            store: The pool's buckets; None = an engine that belongs to no pool, which has none.
            clock: Monotonic, in seconds.
            size: What is known of an earlier run; None = nothing.
        """
        self._store = store
        self._clock = clock
        self._size = size or FleetSize()
        self._buckets: dict[tuple[str, str], LocalBucket] = {}
        # Of limits that are gone, until Redis knows all that was used of them.
        self._left: dict[tuple[str, str], LocalBucket] = {}
        self._is_cut_off = False
        self._no_requests: dict[str, tuple[Shortage, float]] = {}

    @property
    def is_alone(self) -> bool:
        """Whether any limit is divided by the number of engines, as Redis can't be asked."""
        return self._is_cut_off or any(bucket.is_alone for bucket in self._buckets.values())

    def use_policy(self, snapshot: PolicySnapshot) -> None:
        """Obey other limits from now on; what was used of one that comes back still counts."""
        if self._store is None:
            return
        before, self._buckets = {**self._left, **self._buckets}, {}
        self._no_requests = {}
        for rule in snapshot.tenants:
            for unit, limit in _limits(rule.rate):
                key = (rule.tenant, unit)
                bucket = before.pop(key, None) or self._new_bucket(key, limit, self._store)
                bucket.use_limit(limit)
                self._buckets[key] = bucket
        self._left = {key: bucket for key, bucket in before.items() if not bucket.is_settled}

    def limits_tokens(self, tenant: str) -> bool:
        """Tell whether it counts how many tokens are reserved for `tenant`."""
        return (tenant, TOKENS) in self._buckets

    def known_shortage(self, tenant: str) -> Shortage | None:
        """Return why any request of `tenant` would be refused now, without asking anybody."""
        shortage, until = self._no_requests.get(tenant, (None, 0.0))
        if shortage is None:
            return None
        wait = until - self._clock()
        if wait <= 0:
            del self._no_requests[tenant]
            return None
        return replace(shortage, wait_seconds=wait)

    async def reserve(self, tenant: str, tokens: float) -> Reservation | Shortage:
        """Set aside one request and so many tokens, or nothing."""
        of_requests = self._buckets.get((tenant, REQUESTS))
        requests = await _short_of(REQUESTS, of_requests, 1.0)
        if requests is not None:
            self._no_requests[tenant] = requests, self._clock() + requests.wait_seconds
            return requests
        of_tokens = self._buckets.get((tenant, TOKENS))
        shortage = await _short_of(TOKENS, of_tokens, tokens)
        if shortage is None:
            return Reservation(tenant, tokens, of_tokens)
        if of_requests is not None:
            of_requests.give_back(1.0)
            self._no_requests.pop(tenant, None)
        return shortage

    def settle(self, reservation: Reservation, *, used_tokens: float) -> None:
        """Give back what a request didn't use; what it used beyond is charged.

        Both where it was taken: a limit that came later owes nothing for it.
        """
        if reservation.bucket is not None:
            reservation.bucket.give_back(reservation.tokens - used_tokens)

    async def run(self) -> None:
        """Renew leases until cancelled."""
        was_alone = False
        while True:
            await self.renew()
            if self.is_alone is not was_alone:
                was_alone = self.is_alone
                self._tell(is_alone=was_alone)
            await asyncio.sleep(RENEW_SECONDS)

    async def renew(self) -> None:
        """Say that this engine lives, and renew all leases.

        A few at a time: each takes a connection. Without Redis all limits are divided, also those
        of which nothing is used now: what comes then needs not wait to find that out.
        """
        if self._store is None:
            return
        try:
            num_engines = await self._store.count_engines()
        except (RedisError, OSError):
            self._is_cut_off = True
            self._size.note_silence()
            for bucket in (*self._buckets.values(), *self._left.values()):
                bucket.go_alone()
            return
        self._is_cut_off = False
        await self._size.note(num_engines, now=self._clock(), patience_seconds=EXPIRY_SECONDS)
        turns = asyncio.Semaphore(_RENEWED_AT_ONCE)

        async def renew_in_turn(bucket: LocalBucket) -> None:
            async with turns:
                await bucket.renew()

        buckets = (*self._buckets.values(), *self._left.values())
        await asyncio.gather(*map(renew_in_turn, buckets))
        self._left = {key: bucket for key, bucket in self._left.items() if not bucket.is_settled}

    def _new_bucket(
        self, key: tuple[str, str], limit: BucketLimit, store: BucketStore
    ) -> LocalBucket:
        bucket = LocalBucket(*key, limit, store=store, size=self._size, clock=self._clock)
        if self._is_cut_off:
            bucket.go_alone()
        return bucket

    def _tell(self, *, is_alone: bool) -> None:
        if is_alone:
            _log.warning("Redis can't be asked: this engine has its part of every rate limit")
        else:
            _log.info("rate limits are leased from the pool again")


async def _short_of(unit: str, bucket: LocalBucket | None, amount: float) -> Shortage | None:
    """Take so much, where there is a limit; return what was lacking if it was not taken."""
    wait = 0.0 if bucket is None else await bucket.reserve(amount)
    if bucket is None or not wait:
        return None
    return Shortage(unit=unit, per_minute=bucket.limit.per_minute, wait_seconds=wait)


def _limits(rule: RateRule) -> list[tuple[str, BucketLimit]]:
    limits = ((TOKENS, rule.tokens_per_minute), (REQUESTS, rule.requests_per_minute))
    return [
        (unit, BucketLimit(per_minute=limit, depth=limit * rule.burst_percent / 100))
        for unit, limit in limits
        if limit is not None
    ]
