"""One limit of one tenant in this engine: what is leased of it, and what was used."""

import asyncio
from collections.abc import Callable

from redis.exceptions import RedisError

from tidegate_engine.fleet.bucket_script import Ask, BucketLimit, BucketStore
from tidegate_engine.fleet.size import FleetSize

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
        size: FleetSize,
        clock: Callable[[], float],
    ) -> None:
        """Begin with nothing leased.

        Args:
            tenant: Whose limit.
            unit: `tokens` or `requests`.
            limit: In force.
            store: Where the pool's bucket is.
            size: Tells by how many the limit is divided.
            clock: Monotonic, in seconds; counts only while Redis can't be asked.
        """
        self.limit = limit
        self.is_alone = False
        self._tenant = tenant
        self._unit = unit
        self._store = store
        self._size = size
        self._clock = clock
        self._name = store.new_lease()
        # What Redis said is held, before what was spent since; with the own part while alone.
        self._held = 0.0
        # Since ever, and what of that Redis has answered to.
        self._spent = 0.0
        self._told = 0.0
        self._leased = 0.0
        self._is_used = False
        self._filled_at = 0.0
        self._asking = asyncio.Lock()

    @property
    def unspent(self) -> float:
        """What is left of the lease; negative when more was used than was reserved."""
        return self._held - (self._spent - self._told)

    @property
    def is_settled(self) -> bool:
        """Whether Redis knows all that was used, and nothing is held any more."""
        return not self._held and self._spent == self._told

    def use_limit(self, limit: BucketLimit) -> None:
        """Obey another limit; of what was leased of the old one a new lease's worth is kept."""
        if limit == self.limit:
            return
        if self.is_alone:
            self._fill_up()
        self.limit = limit
        self._leased = 0.0
        self._shed_surplus()

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
        self._shed_surplus()

    async def renew(self) -> None:
        """Tell what was used, and that the lease is still wanted; one without use is given back."""
        async with self._asking:
            is_used, self._is_used = self._is_used, False
            if self.is_alone and not is_used and self._spent == self._told:
                # Nothing to settle: after an outage not all limits of all tenants have to ask.
                self.is_alone, self._held = False, 0.0
            elif not self.is_settled or self.is_alone:
                await self._ask(gives_up=not is_used)

    def go_alone(self) -> None:
        """Go on with this engine's part: Redis can't be asked."""
        if not self.is_alone:
            self._filled_at = self._clock()
        self.is_alone = True
        self._fill_up()

    def _take(self, amount: float) -> bool:
        required = amount
        if self.is_alone:
            self._fill_up()
            required = self._required_alone(amount)
        if self.unspent < required:
            return False
        self._spent += amount
        return True

    @property
    def _chunk(self) -> float:
        return self.limit.per_minute / 60 * _CHUNK_SECONDS

    @property
    def _part_of_depth(self) -> float:
        return self.limit.depth / self._size.num_engines

    def _required_alone(self, amount: float) -> float:
        """Return what has to be there: what is beyond the part of the depth passes at its half."""
        return amount if amount <= self._part_of_depth else self._part_of_depth / 2

    async def _lease(self, amount: float) -> float:
        wait = 0.0
        if not self.is_alone:  # else `renew` alone asks: who is refused must not wait for that
            wait = await self._ask(needed=amount - self.unspent, chunk=self._chunk)
            if self._take(amount):
                return 0.0
        if self.is_alone:
            lacking = self._required_alone(amount) - self.unspent
            wait = lacking * 60 * self._size.num_engines / self.limit.per_minute
        return max(wait, _LEAST_WAIT_SECONDS)

    async def _ask(
        self, *, needed: float = 0.0, chunk: float = 0.0, gives_up: bool = False
    ) -> float:
        """Ask Redis; without an answer go on alone.

        A caller that leaves meanwhile changes nothing: what it was granted is not kept the next
        time.

        Returns:
            When what was needed will be there.
        """
        spent, covered = self._spent, self._covered()
        if gives_up:  # nobody takes meanwhile what is being given back
            self._held -= max(0.0, self.unspent)
        ask = Ask(
            lease=self._name,
            spent=spent,
            told=self._told,
            covered=covered,
            kept=max(0.0, self.unspent),
            needed=needed,
            chunk=chunk,
        )
        try:
            lease = await self._store.lease(self._tenant, self._unit, self.limit, ask)
        except (RedisError, OSError):
            self.go_alone()
            return 0.0
        self.is_alone = False
        self._told = spent
        self._held = self._leased = lease.held
        return lease.wait_seconds

    def _covered(self) -> float:
        """Return what of the spending while alone this engine's part of the inflow has covered.

        All but what its part of the depth lacks now: that much less there is in the pool's bucket.
        """
        if not self.is_alone:
            return 0.0
        self._fill_up()
        lacking = max(0.0, self._part_of_depth - self.unspent)
        return max(0.0, self._spent - self._told - lacking)

    def _fill_up(self) -> None:
        """Add this engine's part of what has flown in since Redis couldn't be asked."""
        now = self._clock()
        part = self.limit.per_minute / 60 / self._size.num_engines
        most = max(0.0, self._part_of_depth - self.unspent)
        self._held += min(part * (now - self._filled_at), most)
        self._filled_at = now

    def _shed_surplus(self) -> None:
        """Hold no more than a lease, or alone the part of the depth.

        What is given back beyond that is the pool's, whose bucket may be full.
        """
        most = self._part_of_depth if self.is_alone else max(self._chunk, self._leased)
        self._held -= max(0.0, self.unspent - most)
