"""The rate limits of all tenants, as this engine takes part in them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from tidegate_engine.fleet.bucket import LocalBucket
from tidegate_engine.fleet.bucket_script import BucketLimit, BucketStore
from tidegate_policies.rules import RateRule
from tidegate_policies.snapshot import PolicySnapshot

TOKENS, REQUESTS = "tokens", "requests"

EXPIRY_SECONDS = 6.0
"""The lease of an engine that was silent for so long returns to the pool."""

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
    """

    tenant: str
    tokens: float


class FleetRates:
    """Reserves, settles and renews, for every tenant with a limit."""

    def __init__(self, store: BucketStore | None, *, clock: Callable[[], float]) -> None:
        """Begin without limits; `run` keeps leases alive.

        Args:
            store: The pool's buckets; None = an engine that belongs to no pool, which has none.
            clock: Monotonic, in seconds.
        """
        self._store = store
        self._clock = clock
        self._buckets: dict[tuple[str, str], LocalBucket] = {}
        self._no_requests: dict[str, tuple[Shortage, float]] = {}

    @property
    def is_alone(self) -> bool:
        """Whether any limit is divided by the number of engines, as Redis can't be asked."""
        return any(bucket.is_alone for bucket in self._buckets.values())

    def use_policy(self, snapshot: PolicySnapshot) -> None:
        """Obey other limits from now on; what is leased stays leased."""
        before, self._buckets = self._buckets, {}
        self._no_requests = {}
        if self._store is None:
            return
        for rule in snapshot.tenants:
            for unit, limit in _limits(rule.rate):
                key = (rule.tenant, unit)
                bucket = before.get(key) or LocalBucket(
                    *key, limit, store=self._store, clock=self._clock
                )
                bucket.limit = limit
                self._buckets[key] = bucket

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
        requests = await self._reserve(tenant, REQUESTS, 1.0)
        if requests is not None:
            self._no_requests[tenant] = requests, self._clock() + requests.wait_seconds
            return requests
        shortage = await self._reserve(tenant, TOKENS, tokens)
        if shortage is None:
            return Reservation(tenant, tokens)
        if (bucket := self._buckets.get((tenant, REQUESTS))) is not None:
            bucket.give_back(1.0)
            self._no_requests.pop(tenant, None)
        return shortage

    def settle(self, reservation: Reservation, *, used_tokens: float) -> None:
        """Give back what a request didn't use; what it used beyond is charged."""
        if (bucket := self._buckets.get((reservation.tenant, TOKENS))) is not None:
            bucket.give_back(reservation.tokens - used_tokens)

    async def run(self) -> None:
        """Renew leases until cancelled."""
        was_alone = False
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            await self.renew()
            if self.is_alone is not was_alone:
                was_alone = self.is_alone
                self._tell(is_alone=was_alone)

    async def renew(self) -> None:
        """Renew all leases, a few at a time: each takes a connection."""
        turns = asyncio.Semaphore(_RENEWED_AT_ONCE)

        async def renew_in_turn(bucket: LocalBucket) -> None:
            async with turns:
                await bucket.renew()

        await asyncio.gather(*map(renew_in_turn, self._buckets.values()))

    def _tell(self, *, is_alone: bool) -> None:
        if is_alone:
            _log.warning("Redis can't be asked: this engine has its part of every rate limit")
        else:
            _log.info("rate limits are leased from the pool again")

    async def _reserve(self, tenant: str, unit: str, amount: float) -> Shortage | None:
        bucket = self._buckets.get((tenant, unit))
        if bucket is None:
            return None
        wait = await bucket.reserve(amount)
        if not wait:
            return None
        return Shortage(unit=unit, per_minute=bucket.limit.per_minute, wait_seconds=wait)


def _limits(rule: RateRule) -> list[tuple[str, BucketLimit]]:
    limits = ((TOKENS, rule.tokens_per_minute), (REQUESTS, rule.requests_per_minute))
    return [
        (unit, BucketLimit(per_minute=limit, depth=limit * rule.burst_percent / 100))
        for unit, limit in limits
        if limit is not None
    ]
