"""Whatever happens, no more is granted than the budget and a lease for each engine."""

from collections import Counter

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine.fleet.rates import RENEW_SECONDS, FleetRates, Reservation
from tidegate_engine.fleet.size import FleetSize
from tidegate_policies.rules import RateRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.rates import Fleet, Store, a_fleet, renew

NUM_ENGINES = 3
PER_MINUTE, BURST_PERCENT = 1800, 20
DEPTH = PER_MINUTE * BURST_PERCENT / 100
MOST_LEASED = 50.0  # requests need no more, and a chunk is a second's worth
COMMON = ["reserve"] * 12 + ["wait"] * 2
CALM = ["settle", "rest", "crash", "jump back", "other limit", "recreate"]
# Where one of these happens, engines may for a time hold leases that the pool has taken back, or
# that debt of others has eaten up.
UNSETTLING = ["overuse", "beyond", "jump ahead", "cut off", "lose an answer"]
# Without these nothing flows beside the pool's bucket, and nothing comes back to it late.
UNCAPPED = {"settle", "cut off", "lose an answer"}

Event = tuple[str, int, int]
"""What happens, to which engine, and a number up to 50."""


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """Draw what happens at all, then many events: of one of all kinds each kind does little."""
    rare = draw(st.lists(st.sampled_from(CALM), unique=True, max_size=2))
    if draw(st.booleans()):
        rare.append(draw(st.sampled_from(UNSETTLING)))
    if "cut off" in rare:
        rare += ["reconnect", "outage"]
    event = st.tuples(
        st.sampled_from([*COMMON, *rare]), st.integers(0, NUM_ENGINES - 1), st.integers(1, 50)
    )
    return draw(st.lists(event, min_size=150, max_size=300))


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shorten a run takes minutes
)
@given(events=runs())
async def test_never_more_is_granted_than_the_budget_and_a_lease_for_each_engine(
    redis_server: RedisServer, events: list[Event]
) -> None:
    redis = Redis.from_url(redis_server.url, socket_timeout=2)
    try:
        run = Run(await a_fleet(redis), kinds={kind for kind, _, _ in events})
        await run.begin()
        for event in (*events, ("rest", 0, 0)):
            await run.happen(*event)
    finally:
        await redis.aclose()


class Run:
    """Engines, and beside them the sums of what they may have used and did.

    Attributes:
        budget: What there was at first, what flowed in, and the parts of those cut off.
        used: What requests have, more or less than was reserved for them included.
        untold: By engine, what was taken since Redis last answered.
        parts: By engine that can't ask Redis, by how many it divides the limit.
        owed: By engine that can't ask Redis, what was used beyond reservations there.
    """

    def __init__(self, fleet: Fleet, *, kinds: set[str]) -> None:
        self.fleet = fleet
        self.kinds = kinds
        self.slack = NUM_ENGINES * MOST_LEASED if kinds.intersection(UNSETTLING) else 0.0
        self.budget = DEPTH
        self.used = 0.0
        self.granted_over = 0.0
        self.untold = [0.0] * NUM_ENGINES
        self.parts: dict[int, int] = {}
        self.owed = Counter[int]()
        self.reserved: list[list[Reservation]] = [[] for _ in range(NUM_ENGINES)]
        self.sizes = [FleetSize() for _ in range(NUM_ENGINES)]  # as on their disks
        self.names = [""] * NUM_ENGINES
        self.num_started = 0
        self.per_minute = PER_MINUTE
        self.since_round = 0.0

    async def begin(self) -> None:
        self.engines = [self._start(number) for number in range(NUM_ENGINES)]
        self._use_policy(self._policy())
        await renew(self.engines)
        await renew(self.engines)

    async def happen(self, kind: str, which: int, amount: int) -> None:
        """Let an event pass; `amount` means what fits the kind."""
        await getattr(self, "_" + kind.replace(" ", "_"))(which, amount)

    async def _reserve(self, which: int, amount: int, *, is_beyond: bool = False) -> None:
        before = self._store(which).num_answers
        reservation = await self.engines[which].reserve("acme", amount)
        if self._store(which).num_answers > before:
            self.untold[which] = 0.0
        if not isinstance(reservation, Reservation):
            return
        self.reserved[which].append(reservation)
        self.untold[which] += amount
        self.used += amount
        if self.used <= self.budget + 1e-6:
            self.granted_over = 0.0
        elif not is_beyond:
            self.granted_over += min(amount, self.used - self.budget)
        assert self.granted_over <= self.slack + 1e-6

    async def _beyond(self, which: int, _: int) -> None:
        """Reserve more than a bucket holds, which is granted on credit."""
        if which not in self.parts:
            await self._reserve(which, PER_MINUTE, is_beyond=True)

    async def _settle(self, which: int, amount: int) -> None:
        if self.reserved[which]:
            reservation = self.reserved[which].pop()
            unused = min(float(amount), reservation.tokens)
            self.engines[which].settle(reservation, used_tokens=reservation.tokens - unused)
            self.used -= unused
            self.untold[which] -= unused
            self.granted_over = max(0.0, self.granted_over - unused)

    async def _overuse(self, which: int, amount: int) -> None:
        if self.reserved[which]:
            reservation = self.reserved[which].pop()
            self.engines[which].settle(reservation, used_tokens=reservation.tokens + 3 * amount)
            self.owed[which] += 3 * amount
            await self._round(which)

    async def _wait(self, _: int, amount: int) -> None:
        await self._pass(amount / 20)

    async def _rest(self, _: int, __: int) -> None:
        """Let all leases return and the bucket fill up, lease a little, and then ask for all."""
        for _ in range(6):
            await self._pass(RENEW_SECONDS)
        for amount in (1, 50, 50, 50):
            for which in range(NUM_ENGINES):
                await self._reserve(which, amount)
            if amount == 1:
                await self._pass(RENEW_SECONDS / 2)

    async def _crash(self, which: int, _: int) -> None:
        """What the engine used and never told, the pool takes for unused."""
        await self._pass(1.0)
        await self._reserve(which, 1)  # so that it dies with a lease, if there is any budget
        if which not in self.parts and "beyond" not in self.kinds:
            assert self.untold[which] <= MOST_LEASED + 1e-6
        self.budget += max(0.0, self.untold[which])
        self.untold[which] = 0.0
        self.owed.pop(which, None)
        self.reserved[which] = []
        is_cut_off = self._store(which).is_cut_off
        self.engines[which] = self._start(which)
        self._store(which).is_cut_off = is_cut_off
        await self._round(which)
        self.engines[which].use_policy(self._policy())

    async def _jump_ahead(self, _: int, amount: int) -> None:
        await self.fleet.jump(amount)
        self.budget += min(amount * self._per_second, DEPTH)

    async def _jump_back(self, _: int, amount: int) -> None:
        await self.fleet.jump(-amount)

    async def _cut_off(self, which: int, _: int) -> None:
        if which not in self.parts:
            await self._round(which)  # so that it knows who is there
            self.parts[which] = NUM_ENGINES - len(self.parts)
            self._store(which).is_cut_off = True

    async def _reconnect(self, which: int, _: int) -> None:
        self._store(which).is_cut_off = False
        await self._round(which)

    async def _outage(self, _: int, __: int) -> None:
        """Have Redis away for all, with more asked for than there is."""
        for which in range(NUM_ENGINES):
            await self._reconnect(which, 0)
        for which in range(NUM_ENGINES):
            self._store(which).is_cut_off = True
            self.parts[which] = NUM_ENGINES
        for _ in range(20):
            await self._pass(1.0)
            for which in range(NUM_ENGINES):
                await self._reserve(which, 30)
        for which in range(NUM_ENGINES):
            await self._reconnect(which, 0)

    async def _lose_an_answer(self, which: int, _: int) -> None:
        if which not in self.parts:
            self._store(which).loses_answers = True
            self.parts[which] = NUM_ENGINES - len(self.parts)
            await self.engines[which].renew()
            self._store(which).loses_answers = False

    async def _other_limit(self, _: int, __: int) -> None:
        await self.fleet.fill_up(self.per_minute, self._depth)  # by the limit that was in force
        self.per_minute = PER_MINUTE * 3 // 2 - self.per_minute
        self._use_policy(self._policy())

    async def _recreate(self, _: int, amount: int) -> None:
        """Have the tenant gone for a moment, or for longer."""
        self._use_policy(a_snapshot())
        if amount % 2:
            await self._pass(RENEW_SECONDS)
        self.reserved = [[] for _ in range(NUM_ENGINES)]
        self._use_policy(self._policy())

    async def _pass(self, seconds: float) -> None:
        """Let time pass; all engines have their rounds."""
        await self.fleet.wait(seconds)
        self.since_round += seconds
        per_part = seconds * self._per_second
        self.budget += per_part + sum(per_part / number for number in self.parts.values())
        if not self.kinds & UNCAPPED:
            self.budget = min(self.budget, self.used + DEPTH)
        if self.since_round >= RENEW_SECONDS:
            self.since_round = 0.0
            for which in range(NUM_ENGINES):
                await self._round(which)

    async def _round(self, which: int) -> None:
        await self.engines[which].renew()
        if not self._store(which).is_cut_off:
            self.parts.pop(which, None)
            self.untold[which] = 0.0
            self.used += self.owed.pop(which, 0)

    def _start(self, which: int) -> FleetRates:
        self.num_started += 1
        self.names[which] = f"engine-{self.num_started}"
        return self.fleet.rates(self.names[which], self.sizes[which])

    def _store(self, which: int) -> Store:
        return self.fleet.stores[self.names[which]]

    def _policy(self) -> PolicySnapshot:
        rule = RateRule(tokens_per_minute=self.per_minute, burst_percent=BURST_PERCENT)
        return a_snapshot(a_tenant(rate=rule))

    def _use_policy(self, policy: PolicySnapshot) -> None:
        for rates in self.engines:
            rates.use_policy(policy)

    @property
    def _per_second(self) -> float:
        return self.per_minute / 60

    @property
    def _depth(self) -> float:
        return self.per_minute * BURST_PERCENT / 100
