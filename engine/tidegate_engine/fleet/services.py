"""Who got how much service of which engine: told to the pool once a second, through Redis.

Engines add what they gave to one sum per account, which is a tenant in one of its tiers, and read
the sums: what grew without them, others gave. So an exchange costs as much as there are accounts,
however many engines the pool has.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidegate_engine.core.request import AccountStats

EXCHANGE_SECONDS = 1.0
"""How often engines tell each other."""

ACTIVE_SECONDS = 3.5
"""A tenant whose engine was silent for so long wants no service there."""

_EXCHANGE = """
local sums, active = KEYS[1], KEYS[2]
local told = cjson.decode(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
for tenant, cost in pairs(told.service) do
  redis.call('HINCRBYFLOAT', sums, tenant, cost)
end
for _, tenant in ipairs(told.active) do
  redis.call('ZADD', active, now + tonumber(ARGV[3]), ARGV[1] .. '\\n' .. tenant)
end
for _, tenant in ipairs(told.idle) do
  redis.call('ZREM', active, ARGV[1] .. '\\n' .. tenant)
end
redis.call('ZREMRANGEBYSCORE', active, '-inf', now)
redis.call('EXPIRE', sums, 3600)
redis.call('EXPIRE', active, 3600)
return {redis.call('HGETALL', sums), redis.call('ZRANGE', active, 0, -1)}
"""

Listener = Callable[[Mapping[str, float], Sequence[str]], object]
"""Told what others gave since the last time, by account in cost units, and who competes there."""

_log = logging.getLogger(__name__)


class ServiceExchange:
    """This engine's part in it."""

    def __init__(
        self,
        redis: Redis,
        *,
        pool: str,
        engine: str,
        served: Callable[[], Mapping[str, AccountStats]],
        listener: Listener,
    ) -> None:
        """Prepare; `run` begins.

        Args:
            redis: Its commands must time out.
            pool: `namespace/name`.
            engine: This engine's name, unique in the pool and to this start of it.
            served: The newest count of this engine, by account.
            listener: Told what others did.
        """
        self._pool = pool
        self._engine = engine
        self._served = served
        self._listener = listener
        self._script = redis.register_script(_EXCHANGE)
        self._counted: dict[str, float] = {}
        self._given: dict[str, float] = {}
        self._active: dict[str, None] = {}
        self._others: dict[str, float] | None = None
        self._is_failing = False

    async def run(self) -> None:
        """Exchange until cancelled. Without Redis each engine is fair by what it knows itself."""
        while True:
            try:
                await self.exchange()
            except (RedisError, OSError) as error:
                if not self._is_failing:
                    _log.warning("service of other engines is not known: %s", error)
                    self._listener({}, [])  # who competes elsewhere may do so no more
                self._is_failing = True
            else:
                self._is_failing = False
            await asyncio.sleep(EXCHANGE_SECONDS)

    async def exchange(self) -> None:
        """Tell and listen once.

        Raises:
            RedisError: Redis can't be asked; what was to be told is told the next time.
        """
        stats = self._served()
        active = dict.fromkeys(name for name, account in stats.items() if account.competes)
        growth = self._growth(stats)
        told = {
            "service": growth,
            "active": list(active),
            "idle": [name for name in self._active if name not in active],
        }
        sums, working = await self._script(
            keys=[f"tidegate:{self._pool}:service", f"tidegate:{self._pool}:active"],
            args=[self._engine, json.dumps(told), ACTIVE_SECONDS],
        )
        self._active = active
        self._counted = {name: account.service for name, account in stats.items()}
        for name, cost in growth.items():
            self._given[name] = self._given.get(name, 0.0) + cost
        self._listen(
            {name.decode(): float(cost) for name, cost in zip(sums[::2], sums[1::2], strict=True)},
            [entry.decode().split("\n", 1) for entry in working],
        )

    def _growth(self, stats: Mapping[str, AccountStats]) -> dict[str, float]:
        """Return the service since the last time; who was forgotten meanwhile is counted anew."""
        growth: dict[str, float] = {}
        for name, (service, _) in stats.items():
            before = self._counted.get(name, 0.0)
            grown = service - (before if before <= service else 0.0)
            if grown > 0:
                growth[name] = grown
        return growth

    def _listen(self, sums: Mapping[str, float], working: Sequence[Sequence[str]]) -> None:
        others = {name: cost - self._given.get(name, 0.0) for name, cost in sums.items()}
        before, self._others = self._others, others
        if before is None:  # what was given before this engine's time is nobody's advantage here
            before = others
        grown = {name: cost - before.get(name, 0.0) for name, cost in others.items()}
        # Sums fall when Redis was emptied: what was given from then on counts.
        service = {name: cost for name, cost in grown.items() if cost > 0}
        active = dict.fromkeys(tenant for engine, tenant in working if engine != self._engine)
        self._listener(service, list(active))
