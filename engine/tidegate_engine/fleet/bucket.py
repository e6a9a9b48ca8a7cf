"""One limit of one tenant in this engine: what is leased of it, and what was used."""

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from tidegate_engine.fleet.bucket_script import BucketLimit, BucketStore

_CHUNK_SECONDS = 1.0
"""A lease is for about as long: long enough that Redis is asked once a second, no more."""

_LEAST_WAIT_SECONDS = 1e-3


class LocalBucket:
    """What this engine may spend of one limit without asking.

    Attributes:
        limit: In force.
        is_alone: Whether Redis can't be asked, so that this engine goes on with its part alone.
    """

    def __init__(
        self,
        tenant: str,
        unit: str,
        limit: BucketLimit,
        *,
        store: BucketStore,
        clock: Callable[[], float],
    ) -> None:
        """Begin with nothing leased.

        Args:
            tenant: Whose limit.
            unit: `tokens` or `requests`.
            limit: In force.
            store: Where the pool's bucket is.
            clock: Monotonic, in seconds; counts only while Redis can't be asked.
        """
        self.limit = limit
        self.is_alone = False
        self._tenant = tenant
        self._unit = unit
        self._store = store
        self._clock = clock
        self._held = 0.0
        self._spent = 0.0
        self._is_used = False
        self._filled_at = 0.0
        self._asking = asyncio.Lock()

    @property
    def unspent(self) -> float:
        """What is left of the lease; negative when more was used than was reserved."""
        return self._held - self._spent

    async def reserve(self, amount: float) -> float:
        """Take so much of the budget, or nothing.

        Returns:
            0 when it was taken, else the seconds after which it may be there.
        """
        self._is_used = True
        if not self._take(amount):
            async with self._asking:
                # Who waited here may find what the one before has leased.
                if not self._take(amount):
                    return await self._lease(amount)
        return 0.0

    def give_back(self, amount: float) -> None:
        """Settle: `amount` of what was reserved was not used; negative = more was used."""
        self._spent -= amount

    async def renew(self) -> None:
        """Tell what was used, and that the lease is still wanted; one without use is given back."""
        async with self._asking:
            unspent = max(0.0, self.unspent)
            is_used, self._is_used = self._is_used, False
            if self._spent or self._held or self.is_alone:
                await self._ask(returned=0.0 if is_used else unspent)

    def _take(self, amount: float) -> bool:
        required = amount
        if self.is_alone:
            self._fill_up()
            required = self._required_alone(amount)
        if self.unspent < required:
            return False
        self._spent += amount
        return True

    def _required_alone(self, amount: float) -> float:
        """Return what has to be there: what is beyond the part of the depth passes at its half."""
        most = self.limit.depth / self._store.num_engines
        return amount if amount <= most else most / 2

    async def _lease(self, amount: float) -> float:
        wait = 0.0
        if not self.is_alone:  # else `renew` alone asks: who is refused must not wait for that
            chunk = self.limit.per_minute / 60 * _CHUNK_SECONDS
            wait = await self._ask(needed=amount - self.unspent, chunk=chunk)
            if self._take(amount):
                return 0.0
        if self.is_alone:
            lacking = self._required_alone(amount) - self.unspent
            wait = lacking * 60 * self._store.num_engines / self.limit.per_minute
        return max(wait, _LEAST_WAIT_SECONDS)

    async def _ask(
        self, *, needed: float = 0.0, chunk: float = 0.0, returned: float = 0.0
    ) -> float:
        """Ask Redis; without an answer go on alone.

        Returns:
            When what was needed will be there.
        """
        spent, self._spent = self._spent, 0.0
        held = self._held
        self._held -= spent + returned  # nobody takes meanwhile what is being given back
        try:
            lease = await self._store.lease(
                self._tenant,
                self._unit,
                self.limit,
                spent=spent,
                returned=returned,
                needed=needed,
                chunk=chunk,
            )
        except asyncio.CancelledError:
            self._held, self._spent = held, self._spent + spent
            raise
        except (RedisError, OSError):
            self._held, self._spent = held, self._spent + spent
            self._go_alone()
            return 0.0
        self.is_alone = False
        self._held = lease.held
        return lease.wait_seconds

    def _go_alone(self) -> None:
        if not self.is_alone:
            self._filled_at = self._clock()
        self.is_alone = True
        self._fill_up()

    def _fill_up(self) -> None:
        """Add this engine's part of what has flown in since Redis couldn't be asked."""
        now = self._clock()
        part = self.limit.per_minute / 60 / self._store.num_engines
        most = self.limit.depth / self._store.num_engines
        added = min(part * (now - self._filled_at), max(0.0, most - self.unspent))
        self._held += added
        self._filled_at = now
