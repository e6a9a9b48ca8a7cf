"""The token bucket of one limit of one tenant in one pool, as engines lease from it in Redis.

Everything happens in one script, so that however many engines ask at once, what they are granted
together is never more than there is. Time is Redis' own: engines' clocks don't matter, and a clock
that steps back counts as no time passed.

A bucket is a hash: `level`, what nobody has leased, negative when more was used than was reserved;
`at`, when it was last filled up; `spilled`, what didn't fit in when it was; and for every lease
what is held, when it expires, what was spent of it since ever, and what had spilled when its
engine last asked. What is leased counts as being in the bucket when it is filled up, or an idle
engine could keep a full lease beside a full bucket.

An engine tells sums, not changes: however often it has to ask until it has an answer, nothing is
charged twice.
"""

from dataclasses import dataclass

from redis.asyncio import Redis

LEASE = """
local bucket, me = KEYS[1], 'lease:' .. ARGV[1]
local per_second, depth = tonumber(ARGV[2]), tonumber(ARGV[3])
local expiry, memory = tonumber(ARGV[4]), tonumber(ARGV[5])
local spent, told, covered = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local kept, needed, chunk = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local function put(lease, amount, expires, charged, mark)
  local value = string.format('%.17g %.17g %.17g %.17g', amount, expires, charged, mark)
  redis.call('HSET', bucket, lease, value)
end

local level, at, spilled = depth, now, 0
local mine, charged, mark = 0, told, nil
local others, freed = 0, 0
local fields = redis.call('HGETALL', bucket)
for i = 1, #fields, 2 do
  local name, value = fields[i], fields[i + 1]
  if name == 'level' then
    level = tonumber(value)
  elseif name == 'at' then
    at = tonumber(value)
  elseif name == 'spilled' then
    spilled = tonumber(value)
  else
    local amount, expires, its_charged, its_mark = string.match(value, '^(%S+) (%S+) (%S+) (%S+)$')
    amount, expires = tonumber(amount), tonumber(expires)
    if name == me then
      mine, charged, mark = amount, tonumber(its_charged), tonumber(its_mark)
    elseif expires <= now - memory then
      freed = freed + amount
      redis.call('HDEL', bucket, name)
    elseif expires <= now then
      freed = freed + amount
      put(name, 0, expires, its_charged, its_mark)
    else
      others = others + amount
      if expires > now + expiry then  -- the clock was set back
        put(name, amount, now + expiry, its_charged, its_mark)
      end
    end
  end
end

local growth = spent - charged
local beyond = math.max(0, growth - mine)
mine = math.max(0, mine - growth)
local returned = math.max(0, mine - kept)
level, mine = level + freed + returned, mine - returned

local room = depth - others - mine
local inflow = math.max(0, now - at) * per_second
spilled = spilled + math.min(inflow, math.max(0, level + inflow - room))
level = math.min(level + inflow, room)

covered = math.min(covered, beyond)
if mark then
  covered = math.min(covered, math.max(0, spilled - mark))
  spilled = spilled - covered
end
level = level - beyond + covered

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
redis.call('HSET', bucket, 'spilled', string.format('%.17g', spilled))
put(me, mine, now + expiry, spent, spilled)
local full_in = math.max(0, depth - level) / per_second
redis.call('PEXPIRE', bucket, math.ceil((full_in + memory) * 1000))
return {string.format('%.17g', mine), string.format('%.17g', wait)}
"""
"""Settles, returns and leases. A need beyond the bucket's depth is met once it is half full: what
is lacking is debt then. What an engine used beyond its lease is taken from the level after that was
filled up, and what its own part has covered from what has spilled since it last asked: so nobody
owes for what would have flowed past a full bucket. Of a bucket that is new to it (Redis was
emptied) all that its part has covered has flowed past."""

COUNT = """
local engines, me, expiry = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
redis.call('ZADD', engines, now + expiry, me)
redis.call('ZREMRANGEBYSCORE', engines, '-inf', now)
local found = redis.call('ZRANGE', engines, 0, -1, 'WITHSCORES')
for i = 1, #found, 2 do
  if tonumber(found[i + 1]) > now + expiry then  -- the clock was set back
    redis.call('ZADD', engines, now + expiry, found[i])
  end
end
redis.call('PEXPIRE', engines, math.ceil(expiry * 1000))
return redis.call('ZCARD', engines)
"""
"""Says that an engine lives, and counts those that do."""

_MEMORY_SECONDS = 3600.0
"""For so long it is known of a lease that has expired what was charged of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLimit:
    """What a bucket holds and how it fills up.

    Attributes:
        per_minute: What flows in.
        depth: The most it holds.
    """

    per_minute: float
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an engine tells of a lease, and wants.

    Attributes:
        lease: Its name, of one tenant and unit.
        spent: Of the lease since ever, less what requests gave back.
        told: What `spent` was when Redis last answered.
        covered: Of what was spent without asking, what the engine's own part has covered.
        kept: So much at most of the lease is still wanted.
        needed: At least so much is leased, or nothing.
        chunk: So much where there is enough, to come again less often.
    """

    lease: str
    spent: float
    told: float
    covered: float = 0.0
    kept: float = 0.0
    needed: float = 0.0
    chunk: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """An answer of the script.

    Attributes:
        held: What the engine holds now.
        wait_seconds: When what was needed will be there; 0 when it was granted.
    """

    held: float
    wait_seconds: float


class BucketStore:
    """The buckets of one pool in Redis, as one engine sees them."""

    def __init__(
        self,
        redis: Redis,
        *,
        pool: str,
        engine: str,
        expiry_seconds: float,
        lease_script: str = LEASE,
        count_script: str = COUNT,
    ) -> None:
        """Prepare.

        Args:
            redis: Its commands must time out.
            pool: `namespace/name`.
            engine: This engine's name, unique in the pool and to this start of it.
            expiry_seconds: An engine that was silent for so long gives its leases back.
            lease_script: What leases.
            count_script: What counts engines.
        """
        self._pool = pool
        self._engine = engine
        self._expiry_seconds = expiry_seconds
        self._lease = redis.register_script(lease_script)
        self._count = redis.register_script(count_script)
        self._num_leases = 0

    def new_lease(self) -> str:
        """Return a name that no lease has had: sums of another one would be taken for its own."""
        self._num_leases += 1
        return f"{self._engine}:{self._num_leases}"

    async def count_engines(self) -> int:
        """Say that this engine lives, and return how many do, itself included.

        Raises:
            RedisError: Redis can't be asked.
        """
        answer = await self._count(
            keys=[f"tidegate:{self._pool}:rate-engines"], args=[self._engine, self._expiry_seconds]
        )
        return int(answer)

    async def lease(self, tenant: str, unit: str, limit: BucketLimit, ask: Ask) -> Lease:
        """Settle what was spent, give back, and lease what is needed or nothing.

        To ask the same again does nothing more, whether the first time had an answer or not.

        Args:
            tenant: Whose bucket.
            unit: `tokens` or `requests`.
            limit: In force.
            ask: What is told and wanted.

        Raises:
            RedisError: Redis can't be asked. All of it may or may not have been done.
        """
        held, wait = await self._lease(
            keys=[f"tidegate:{self._pool}:rate:{unit}:{tenant}"],
            args=[
                ask.lease,
                limit.per_minute / 60,
                limit.depth,
                self._expiry_seconds,
                _MEMORY_SECONDS,
                ask.spent,
                ask.told,
                ask.covered,
                ask.kept,
                ask.needed,
                ask.chunk,
            ],
        )
        return Lease(float(held), float(wait))
