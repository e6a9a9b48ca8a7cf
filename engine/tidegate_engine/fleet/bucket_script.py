"""The token bucket of one limit of one tenant in one pool, as engines lease from it in Redis.

Everything happens in one script, so that however many engines ask at once, what they are granted
together is never more than there is. Time is Redis' own: engines' clocks don't matter, and a clock
that steps back counts as no time passed.

A bucket is a hash: `level`, what nobody has leased, negative when more was used than was reserved;
`at`, when it was last filled up; and for every engine with a lease its amount and when it expires.
What is leased counts as being in the bucket when it is filled up, or an idle engine could keep a
full lease beside a full bucket.
"""

from dataclasses import dataclass

from redis.asyncio import Redis

LEASE = """
local bucket, engines = KEYS[1], KEYS[2]
local me = ARGV[1]
local per_second, depth = tonumber(ARGV[2]), tonumber(ARGV[3])
local expiry = tonumber(ARGV[4])
local spent, returned = tonumber(ARGV[5]), tonumber(ARGV[6])
local needed, chunk = tonumber(ARGV[7]), tonumber(ARGV[8])

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

redis.call('ZADD', engines, now + expiry, me)
redis.call('ZREMRANGEBYSCORE', engines, '-inf', now)
redis.call('PEXPIRE', engines, math.ceil(expiry * 1000))

local level, at, mine, others = depth, now, 0, 0
local fields = redis.call('HGETALL', bucket)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if name == 'level' then
    level = tonumber(value)
  elseif name == 'at' then
    at = tonumber(value)
  end
end
for i = 1, #fields, 2 do
  local owner = string.match(fields[i], '^lease:(.*)$')
  if owner then
    local amount, expires = string.match(fields[i + 1], '^(%S+) (%S+)$')
    amount = tonumber(amount)
    if owner == me then
      mine = amount
    elseif tonumber(expires) <= now then
      level = level + amount
      redis.call('HDEL', bucket, fields[i])
    else
      others = others + amount
    end
  end
end

mine = mine - spent
if mine < 0 then
  level, mine = level + mine, 0
end
returned = math.min(returned, mine)
level, mine = level + returned, mine - returned

local room = depth - others - mine
level = math.min(level + math.max(0, now - at) * per_second, room)

local granted, wait = 0, 0
if needed > 0 then
  local required = math.min(needed, depth / 2)
  if needed <= depth then
    required = needed
  end
  if level >= required then
    granted = math.max(needed, math.min(level, chunk))
    level, mine = level - granted, mine + granted
  else
    wait = (required - level) / per_second
  end
end

redis.call('HSET', bucket, 'level', string.format('%.17g', level))
redis.call('HSET', bucket, 'at', string.format('%.17g', now))
if mine > 0 then
  redis.call('HSET', bucket, 'lease:' .. me, string.format('%.17g %.17g', mine, now + expiry))
else
  redis.call('HDEL', bucket, 'lease:' .. me)
end
local full_in = math.max(0, depth - level) / per_second
redis.call('PEXPIRE', bucket, math.ceil((full_in + expiry + 60) * 1000))
return {string.format('%.17g', granted), string.format('%.17g', mine), string.format('%.17g', wait),
  redis.call('ZCARD', engines)}
"""
"""Settles, returns and leases. A need beyond the bucket's depth is met once it is half full: what
is lacking is debt then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLimit:
    """What a bucket holds and how it fills up.

    Attributes:
        per_minute: What flows in.
        depth: The most it holds.
    """

    per_minute: float
    depth: float


@dataclass(frozen=True, slots=True)
class Lease:
    """An answer of the script.

    Attributes:
        granted: What was leased anew; 0 when it wasn't there.
        held: What the engine holds now, as Redis knows it.
        wait_seconds: When what was needed will be there; 0 when it was granted.
    """

    granted: float
    held: float
    wait_seconds: float


class BucketStore:
    """The buckets of one pool in Redis, as one engine sees them.

    Attributes:
        num_engines: Of the pool, as far as any of them was heard of lately.
    """

    def __init__(
        self, redis: Redis, *, pool: str, engine: str, expiry_seconds: float, script: str = LEASE
    ) -> None:
        """Prepare.

        Args:
            redis: Its commands must time out.
            pool: `namespace/name`.
            engine: This engine's name, unique in the pool and to this start of it.
            expiry_seconds: An engine that was silent for so long gives its leases back.
            script: What is run.
        """
        self._pool = pool
        self.num_engines = 1
        self._engine = engine
        self._expiry_seconds = expiry_seconds
        self._lease = redis.register_script(script)

    async def lease(
        self,
        tenant: str,
        unit: str,
        limit: BucketLimit,
        *,
        spent: float = 0.0,
        returned: float = 0.0,
        needed: float = 0.0,
        chunk: float = 0.0,
    ) -> Lease:
        """Settle what was spent, give back, and lease what is needed or nothing.

        Args:
            tenant: Whose bucket.
            unit: `tokens` or `requests`.
            limit: In force.
            spent: Of the lease since the last call; negative = given back by requests.
            returned: Of the lease, not needed any more.
            needed: At least so much is leased, or nothing.
            chunk: So much where there is enough, to come again less often.

        Raises:
            RedisError: Redis can't be asked. What was to be settled may or may not have been.
        """
        answer = await self._lease(
            keys=[
                f"tidegate:{self._pool}:rate:{unit}:{tenant}",
                f"tidegate:{self._pool}:rate-engines",
            ],
            args=[
                self._engine,
                limit.per_minute / 60,
                limit.depth,
                self._expiry_seconds,
                spent,
                returned,
                needed,
                chunk,
            ],
        )
        granted, held, wait, num_engines = answer
        self.num_engines = max(1, int(num_engines))
        return Lease(float(granted), float(held), float(wait))
