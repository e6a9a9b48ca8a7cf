"""When a request that arrives now would get its first token.

A forecast from the work ahead of it, not a simulation: what higher tiers have queued comes first,
then what the virtual token counters put first in its own tier; all of it needs places in the batch,
which free up as running requests end, and steps that read prompts, whose time is known from those
that went before. Of these, a tier gets the share that it got while it waited lately.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from itertools import chain
from math import ceil, inf
from typing import NamedTuple

from tidegate_engine.core.batch import places, prefill_budget
from tidegate_engine.core.books import Books
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST

_FORGETTING = 0.99
"""What a step of the past counts for after each later one."""


class Backlog(NamedTuple):
    """What is served before somebody else.

    Attributes:
        requests: That have no place in the batch yet.
        prompt_tokens: To be read, of those and of the ones being read.
    """

    requests: float
    prompt_tokens: float


class Joining(NamedTuple):
    """Who comes to decode before somebody is served, beside those who do now.

    Attributes:
        requests: That come first, or are being read.
        places: For them; those beyond replace who has ended.
        context_tokens: Of each, on average while it decodes.
    """

    requests: float
    places: int
    context_tokens: float

    @property
    def at_last(self) -> float:
        """How many more decode once all are read."""
        return min(self.requests, self.places)

    @property
    def on_average(self) -> float:
        """How many more do over the steps that read them, one after another."""
        if not self.requests:
            return 0.0
        return self.at_last * (1.0 - self.at_last / (2.0 * self.requests))


class Staying(NamedTuple):
    """Those in the batch that keep their places until they end.

    Attributes:
        remaining_tokens: What each is expected to produce yet, at least 1, ascending.
        output_tokens: What all will have produced at their ends.
    """

    remaining_tokens: Ordered[int]
    output_tokens: int

    def steps_until(self, wanted: float, *, places: int, outputs: int) -> float:
        """Return the steps until so many more places are free, those who get them having ended.

        Args:
            wanted: Places, above 0.
            places: That nobody holds, for those ahead.
            outputs: Tokens that each of those ahead is expected to produce.
        """
        remaining = self.remaining_tokens
        if not remaining:  # those ahead take all places, and have to end
            return float(outputs * ceil(wanted / max(1, places)))
        if wanted <= len(remaining):
            return float(remaining[ceil(wanted) - 1])
        # Their successors have to end, too.
        return max(remaining[-1], wanted * self.output_tokens / len(remaining) ** 2)


class DrainShares:
    """Which share of the service each tier gets while it has requests waiting.

    Higher tiers go on getting requests while the queue of a lower one is served, and floors take
    from higher ones: both show in what was charged. Steps count for less the longer ago they
    were; who never waited lately is expected to get all that isn't reserved for lower tiers.
    """

    def __init__(self, books: Books) -> None:
        """Read the scheduler's own state; nothing is changed."""
        self._tenants = books.tenants
        self._given = books.shares.given
        self._before: dict[int, float] = {}
        self._waiting: list[int] = []
        self._own: dict[int, float] = {}
        self._all: dict[int, float] = {}
        self._typical = 0.0

    def begin_step(self) -> None:
        """Learn from the step that has ended."""
        given, before = self._given, self._before
        total = sum(given.values()) - sum(before.values())
        if total > 0:
            self._typical += (1.0 - _FORGETTING) * (total - self._typical)
            for value in self._all:
                self._own[value] *= _FORGETTING
                self._all[value] *= _FORGETTING
            for value in self._waiting:
                own = given.get(value, 0.0) - before.get(value, 0.0)
                self._own[value] = self._own.get(value, 0.0) + own
                self._all[value] = self._all.get(value, 0.0) + total
            self._before = dict(given)
        self._waiting = [value for value, tier in self._tenants.tiers.items() if tier.has_work]

    def share(self, tenant: Tenant) -> float:
        """Return the share that the waiting requests of a tenant's tier are expected to get."""
        value = tenant.tier_value
        reserved = sum(
            tier.reserved_percent
            for other_value, tier in self._tenants.tiers.items()
            if other_value < value and tier.has_work
        )
        prior = 1.0 - reserved / 100
        seen = self._all.get(value, 0.0)
        if not seen:
            return prior
        return (self._own[value] + prior * self._typical) / (seen + self._typical)


class TtftForecast:
    """Predicts the time to the first token of arrivals."""

    def __init__(self, books: Books) -> None:
        """Read the scheduler's own state; nothing is changed."""
        self._memory = books.memory
        self._running = books.running
        self._tenants = books.tenants
        self._forecast = books.forecast
        self._step_times = books.step_times
        self._itl = books.itl
        self._drain = DrainShares(books)
        self._seen = -1
        self._final_blocks = 0
        self._remaining: dict[int | str | None, Staying] = {}

    def begin_step(self) -> None:
        """Look at the running requests anew, and learn whom the last step served."""
        self._seen = -1
        self._drain.begin_step()

    def predict(
        self,
        tenant: Tenant,
        prompt_tokens: int,
        max_output_tokens: int,
        *,
        own_ahead: tuple[int, int],
        limits: EngineLimits,
    ) -> float:
        """Return the seconds to the first token of a request that arrives now, or waits.

        Args:
            tenant: Who sends it.
            prompt_tokens: Length of its prompt.
            max_output_tokens: The most that it may produce.
            own_ahead: How many of its tenant's queued requests are served before it, and their
                tokens.
            limits: In force.
        """
        by_engine = self.predict_of_engine(
            tenant, prompt_tokens, max_output_tokens, own_ahead=own_ahead, limits=limits
        )
        by_tenant = self._seconds_under_own_limit(
            tenant, own_ahead[0], prompt_tokens, max_output_tokens
        )
        return max(by_engine, by_tenant)

    def predict_of_engine(
        self,
        tenant: Tenant,
        prompt_tokens: int,
        max_output_tokens: int,
        *,
        own_ahead: tuple[int, int],
        limits: EngineLimits,
    ) -> float:
        """Return the same, had the tenant no `max_running`: what the engine and others cause.

        Args:
            tenant: Who sends it.
            prompt_tokens: Length of its prompt.
            max_output_tokens: The most that it may produce.
            own_ahead: How many of its tenant's queued requests are served before it, and their
                tokens.
            limits: In force.
        """
        outputs = self._forecast.lengths.predict(tenant.name, 0, max_output_tokens)

        own_pairs = prompt_tokens * (prompt_tokens + 1) / 2

        def seconds(ahead: Backlog, share: float) -> float:
            mean_prompt = (ahead.prompt_tokens + prompt_tokens) / (ahead.requests + 1)
            fitting = self._num_fitting(mean_prompt + outputs)
            within_itl = self._itl.num_fitting(tenant.tier_value, mean_prompt + outputs)
            left = places(limits) - self._running.num_places
            free = int(min(left, fitting, within_itl))
            joining = self._joining(ahead, free=free, context_tokens=mean_prompt + outputs / 2)
            while_read = self._decode_seconds(joining.on_average, joining.context_tokens)
            once_read = self._decode_seconds(joining.at_last, joining.context_tokens)
            steps = self._steps_to_place(tenant, ahead, free=free, outputs=outputs)
            placing = steps * once_read + self._marginal(ahead.prompt_tokens, 0)
            reading = self._seconds_to_read(ahead.prompt_tokens, while_read, limits)
            own = self._seconds_to_read(prompt_tokens, once_read, limits)
            # Prompts ahead are read while places are waited for: the longer of the two counts.
            return max(placing, reading) / share + own + self._marginal(0, own_pairs)

        expected = seconds(self.backlog(tenant, own_ahead), self._drain.share(tenant))
        if reserved := self._tenants.tier_of(tenant).reserved_percent:
            of_tier = self.backlog(tenant, own_ahead, passes_higher=True)
            expected = min(expected, seconds(of_tier, reserved / 100))
        return expected

    def seconds_to_room(
        self, tenant: Tenant, *, requests: int, prompt_tokens: int, limits: EngineLimits
    ) -> float:
        """Return when so much of what a tenant has queued should have left its queue.

        That is when the last of it gets its first token, also by the tenant's own `max_running`.
        Of the tiers that it queues in, the one counts in which it goes fastest.

        Args:
            tenant: Whose queue it is.
            requests: How many have to leave, at least 1.
            prompt_tokens: How many tokens those have to have, at least.
            limits: In force.

        Returns:
            Seconds; infinity while the tenant is held.
        """
        if tenant.is_held:
            return inf
        waits = []
        for one in tenant.in_tiers:
            if not (length := len(one.queue)):
                continue
            mean_prompt = one.queue.num_tokens / length
            ahead = max(requests, ceil(prompt_tokens / mean_prompt)) - 1
            own_ahead = ahead, round(ahead * mean_prompt)
            most_outputs = one.queue.num_output_tokens // length
            waits.append(
                self.predict(
                    one, round(mean_prompt), most_outputs, own_ahead=own_ahead, limits=limits
                )
            )
        return min(waits, default=0.0)

    def backlog(
        self, tenant: Tenant, own_ahead: tuple[int, int], *, passes_higher: bool = False
    ) -> Backlog:
        """Return what is served before a request of `tenant`.

        Args:
            tenant: Whose it is.
            own_ahead: As in `predict`.
            passes_higher: Whether higher tiers don't count: the reserved share of its own is
                served beside them.
        """
        own_requests, own_tokens = own_ahead
        value = tenant.tier_value
        most = value if passes_higher else inf
        reading = [s for s in self._running.prefilling if value <= s.tenant.tier_value <= most]
        requests = float(own_requests)
        tokens = float(own_tokens + sum(seq.pending_tokens for seq in reading))
        for other_value, tier in self._tenants.tiers.items():
            if value <= other_value <= most:
                requests += len(tier.resumable)
                tokens += sum(s.pending_tokens for s in tier.resumable if not s.host_table)
            if value < other_value <= most:
                requests += tier.num_queued
                tokens += tier.num_tokens
        is_spare, counter = tenant.key
        own_share = own_requests / (len(tenant.queue) or 1)
        turn_at = counter + own_share * self._queued_cost(tenant) / (tenant.rule.weight or 1)
        for other in self._tenants.tier_of(tenant).listed():
            if other is not tenant:
                share = self._share_before(other, is_spare=is_spare, turn_at=turn_at)
                requests += share * len(other.queue)
                tokens += share * other.queue.num_tokens
        return Backlog(requests, tokens)

    def turn_of(self, tenant: Tenant) -> tuple[bool, float]:
        """Return the place in its tier's order of a tenant's next arrival.

        It is first once all that the tenant has queued is served.
        """
        is_spare, counter = tenant.key
        return is_spare, counter + self._queued_cost(tenant) / (tenant.rule.weight or 1)

    def _share_before(self, other: Tenant, *, is_spare: bool, turn_at: float) -> float:
        """Return the part of a queue that is served before a counter is the least, in [0, 1]."""
        other_is_spare, counter = other.key
        if other_is_spare is not is_spare:
            return float(is_spare)
        cost = self._queued_cost(other)
        before = (turn_at - counter) * (other.rule.weight or 1)
        return min(1.0, max(0.0, before / cost)) if cost else 0.0

    def _queued_cost(self, tenant: Tenant) -> float:
        """Return the service that all of a tenant's queue is expected to take, in cost units."""
        queue = tenant.queue
        if not queue:
            return 0.0
        mean_limit = queue.num_output_tokens // len(queue)
        outputs = len(queue) * self._forecast.lengths.predict(tenant.name, 0, mean_limit)
        return PROMPT_TOKEN_COST * queue.num_tokens + OUTPUT_TOKEN_COST * outputs

    def _steps_to_place(self, tenant: Tenant, ahead: Backlog, *, free: int, outputs: int) -> float:
        """Return after how many steps a place is free, those ahead having got theirs.

        Args:
            tenant: Whose request waits.
            ahead: Who comes before it.
            free: Places that nobody holds.
            outputs: Tokens that a request is expected to produce.
        """
        # Where the tenant's tier may take out lower ones, these make way.
        least_value = tenant.tier_value if tenant.tier.preempts_lower else None
        staying = self._staying(
            least_value, lambda seq: least_value is None or seq.tenant.tier_value >= least_value
        )
        leaving = len(self._running) - len(staying.remaining_tokens)
        wanted = ahead.requests + 1 - free - leaving
        if wanted <= 0:
            return 0.0
        return staying.steps_until(wanted, places=free + leaving, outputs=outputs)

    def _seconds_under_own_limit(
        self, tenant: Tenant, own_ahead: int, prompt_tokens: int, max_output_tokens: int
    ) -> float:
        """Return when a tenant's `max_running` lets a request in, those ahead having been let in.

        Args:
            tenant: Whose request waits.
            own_ahead: How many of its queued requests, of this tier, come before it.
            prompt_tokens: Length of its prompt, as of theirs.
            max_output_tokens: The most that each may produce.
        """
        limit = tenant.rule.max_running
        if limit is None:
            return 0.0
        places = limit - sum(one.running + one.arriving for one in tenant.in_tiers)
        resumable = sum(one.preempted + one.swapped - one.arriving for one in tenant.in_tiers)
        wanted = own_ahead + resumable + 1 - places
        if wanted <= 0:
            return 0.0
        staying = self._staying(tenant.name, lambda seq: seq.tenant.name == tenant.name)
        outputs = self._forecast.lengths.predict(tenant.name, 0, max_output_tokens)
        steps = staying.steps_until(wanted, places=places, outputs=outputs)
        return steps * self._decode_seconds(max(0, places), prompt_tokens + outputs / 2)

    def _staying(self, whose: int | str | None, counts: Callable[[Sequence], bool]) -> "Staying":
        """Return which of those that run count; once for many arrivals.

        Args:
            whose: Under which they are kept: a least value of tiers, a tenant, or None for all.
            counts: Tells it of each.
        """
        self._look_anew()
        found = self._remaining.get(whose)
        if found is None:
            running = chain(self._running.decoding, self._running.prefilling)
            staying = [seq for seq in running if counts(seq)]
            remaining = sorted(max(1, self._forecast.remaining_tokens(seq)) for seq in staying)
            outputs = sum(remaining) + sum(seq.num_output_tokens for seq in staying)
            found = self._remaining[whose] = Staying(remaining, outputs)
        return found

    def _look_anew(self) -> None:
        """Forget what was counted of the running requests if they have changed since."""
        if self._seen == self._running.version:
            return
        self._seen = self._running.version
        self._remaining = {}
        block_size = self._memory.pool.block_size
        self._final_blocks = sum(
            -(-self._forecast.final_tokens(seq) // block_size) for seq in self._running
        )

    def _num_fitting(self, num_tokens: float) -> int:
        """Return how many requests of this context fit the block pool beside all that run."""
        self._look_anew()
        blocks = max(1, ceil(num_tokens / self._memory.pool.block_size))
        return max(0, self._memory.gate.high_blocks - self._final_blocks) // blocks

    def _joining(self, ahead: Backlog, *, free: int, context_tokens: float) -> Joining:
        being_read = len(self._running.prefilling)
        return Joining(being_read + ahead.requests, being_read + max(0, free), context_tokens)

    def _seconds_to_read(
        self, prompt_tokens: float, decode_seconds: float, limits: EngineLimits
    ) -> float:
        """Return the time of the steps that read so many tokens, decodes beside them."""
        running = self._running
        budget = max(1, prefill_budget(running.load, running.prefilling, limits, self._step_times))
        steps = ceil(prompt_tokens / budget)
        return steps * decode_seconds + self._marginal(prompt_tokens, 0)

    def _decode_seconds(self, more: float = 0.0, context_tokens: float = 0.0) -> float:
        """Return the time of a step of the decodes of now and `more`, of so much context each."""
        decodes = len(self._running.decoding) + more
        context = self._running.context_tokens + more * context_tokens
        return self._step_times.predict(StepFeatures(0, round(decodes), round(context), 0))

    def _marginal(self, prompt_tokens: float, pairs: float) -> float:
        """Return what prompt tokens add to the steps in which they are read."""
        costs = self._step_times.costs
        return costs.prefill_token_seconds * prompt_tokens + costs.prefill_pair_seconds * pairs
