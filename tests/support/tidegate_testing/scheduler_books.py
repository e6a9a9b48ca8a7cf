"""What a scheduler's counters have to say, counted from its plans and outputs alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.request import SchedulerStats, TenantStats
from tidegate_testing.scheduler_invariants import Invariant, require
from tidegate_testing.scheduler_view import Flight, Place, PolicyView, Seen

PAIR_COST = 1 / 1024
"""Cost units of a pair of prompt tokens, as the scheduler is told: sums of them are exact."""


@dataclass
class _Totals:
    """One tenant since the scheduler got to know it.

    Attributes:
        repeated: Tokens computed again after a preemption.
        unseen: Most tokens that were found in the prefix cache without any plan showing it: they
            count as paid, hence as repeated when they are computed.
        pairs: Of the prompt tokens and what each attends to.
        unseen_pairs: Most pairs of the unseen tokens.
    """

    prompt: int = 0
    pairs: int = 0
    unseen_pairs: int = 0
    output: int = 0
    repeated: int = 0
    unseen: int = 0
    ends: Counter[str] = field(default_factory=Counter)


class Books:
    """Counts tokens, ends and blocks by tenant."""

    def __init__(self, view: PolicyView) -> None:
        self._view = view
        self._totals: dict[str, _Totals] = {}
        self._used: dict[str, int] = {}
        self._running: Counter[str] = Counter()
        self._arrivals = 0
        self._outputs = 0

    # -- counting --------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Count an accepted request."""
        self._arrivals += 1

    def compute(self, seen: Seen, row: PlanRow) -> None:
        """Count a row that was computed."""
        totals = self._of(seen.tenant)
        prompt = len(seen.request.prompt_ids)
        if seen.computed is None:
            seen.paid = max(seen.paid, min(row.start, prompt))
        seen.computed = row.end
        if not row.is_decode:
            unpaid = max(row.start, seen.paid)
            fresh = max(0, min(row.end, prompt) - unpaid)
            totals.prompt += fresh
            totals.pairs += fresh * unpaid + fresh * (fresh + 1) // 2
            totals.repeated += max(0, min(row.end, seen.paid) - row.start)
            seen.paid = max(seen.paid, row.end)

    def give(self, seen: Seen) -> None:
        """Count an output token."""
        self._of(seen.tenant).output += 1
        self._outputs += 1

    def preempt(self, seen: Seen) -> None:
        """Note that a request is taken out: what it has computed is paid."""
        if seen.computed is None:
            length = len(seen.tokens)
            self._of(seen.tenant).unseen += length
            self._of(seen.tenant).unseen_pairs += length * length
        else:
            seen.paid = max(seen.paid, seen.computed)

    def end(self, seen: Seen, how: str) -> None:
        """Count an end: finished, cancelled or expired."""
        self._of(seen.tenant).ends[how] += 1

    def _of(self, tenant: str) -> _Totals:
        return self._totals.setdefault(tenant, _Totals())

    # -- comparing -------------------------------------------------------------------------------

    def check(self, stats: SchedulerStats, live: Sequence[Seen]) -> None:
        """Verify requests and tokens of every tenant."""
        places = Counter((seen.tenant, seen.place) for seen in live)
        for name in [name for name in self._totals if name not in stats.tenants]:
            del self._totals[name]  # it was undeclared, and its last request has ended
        unknown = [seen.tenant for seen in live if seen.tenant not in stats.tenants]
        require(not unknown, Invariant.SUMS, "no numbers of", unknown)
        for name, found in stats.tenants.items():
            by_place = [places[name, place] for place in Place]
            waiting, running, swapped, arriving, _ = by_place
            counted = (found.waiting, found.running, found.swapped)
            expected = (waiting, running, swapped + arriving)
            require(counted == expected, Invariant.MOVES, name, counted, "not", expected)
            self._check_totals(name, found)
        counted = (stats.waiting, stats.running, stats.swapped)
        expected = tuple(sum(getattr(t, f) for t in stats.tenants.values()) for f in _STATES)
        require(counted == expected, Invariant.SUMS, counted, "not", expected)
        every = (*stats.tenants.values(), stats.gone)
        accounted = sum(counted) + sum(t.finished + t.cancelled + t.expired for t in every)
        is_right = stats.arrivals == accounted == self._arrivals
        require(is_right, Invariant.SUMS, stats.arrivals, accounted, "of", self._arrivals)
        output_tokens = sum(tenant.output_tokens for tenant in every)
        require(output_tokens == self._outputs, Invariant.SUMS, output_tokens, self._outputs)

    def _check_totals(self, name: str, found: TenantStats) -> None:
        totals = self._totals.get(name) or _Totals()
        ends = {"finished": found.finished, "cancelled": found.cancelled, "expired": found.expired}
        require(
            {how: count for how, count in ends.items() if count} == dict(totals.ends),
            Invariant.SUMS,
            name,
            ends,
            "not",
            dict(totals.ends),
        )
        tokens = (found.prompt_tokens, found.output_tokens, found.recomputed_tokens)
        tokens_cost = found.prompt_tokens + 2 * found.output_tokens
        pairs = (found.service - tokens_cost) / PAIR_COST
        is_right = (
            totals.prompt - totals.unseen <= found.prompt_tokens <= totals.prompt
            and found.output_tokens == totals.output
            and totals.repeated <= found.recomputed_tokens <= totals.repeated + totals.unseen
            and totals.pairs - totals.unseen_pairs <= pairs <= totals.pairs
        )
        require(is_right, Invariant.CHARGES, name, tokens, found.service, "not", totals)

    def check_quotas(self, stats: SchedulerStats, live: Sequence[Seen], *, moved: set[str]) -> None:
        """Verify right after planning that nobody took what isn't its own or lent to it.

        Args:
            stats: As they are then.
            live: Who is alive then.
            moved: Tenants of which somebody was admitted or taken out.
        """
        before, self._used = self._used, _used(stats)
        quotas = self._view.quotas
        risen = [name for name, used in self._used.items() if used > before.get(name, 0)]
        free = self._view.num_blocks - stats.kv_used_blocks
        for name in risen:
            quota, used = self._view.quota(name), self._used[name]
            require(used <= quota.cap, Invariant.CAP, name, "holds", used, "of", quota)
            # Owners take from what is kept for them, so that less may be free than was then kept.
            if used > quota.nominal and risen == [name] and moved <= {name}:
                kept = sum(q.kept(self._used.get(n, 0)) for n, q in quotas.items() if n != name)
                require(free >= kept, Invariant.LENDING, name, free, "free,", kept, "not lent")
        for name, count in _running_of(live).items():
            most = self._view.rules[name].max_running
            require(
                most is None or count <= max(most, self._running.get(name, 0)),
                Invariant.TENANT_PLACES,
                name,
                count,
                "of at most",
                most,
            )

    def check_blocks(
        self,
        stats: SchedulerStats,
        live: Sequence[Seen],
        flights: Sequence[Flight],
        *,
        is_open: bool,
    ) -> None:
        """Verify that exactly what tables and copies hold is used, on the device and the host."""
        host = {block for seen in live for block in seen.host}
        host |= {block for _, copy, _ in flights for block in copy.host_blocks}
        require(stats.host_used_blocks == len(host), Invariant.HOST, stats.host_used_blocks, host)
        every = (*stats.tenants.values(), stats.gone)
        by_tenant = sum(tenant.kv_used_blocks for tenant in every)
        # Whoever holds a block pays for it, also where others hold it, too.
        moving = [flight.seen for flight in flights]
        is_shared = sum(seen.has_shared for seen in (*live, *moving)) > 1
        is_right = (
            by_tenant >= stats.kv_used_blocks if is_shared else by_tenant == stats.kv_used_blocks
        )
        require(is_right, Invariant.USED, by_tenant, stats.kv_used_blocks)
        held = {block for seen in live for block in seen.table or ()}
        held |= {block for _, copy, _ in flights for block in copy.device_blocks}
        # Tables on their way in, or of requests without a row so far, are not seen; and while a
        # step runs, the sources of copies on write are held besides.
        is_exact = not is_open and not any(flight.is_in for flight in flights)
        is_exact &= all(seen.table is not None for seen in live if seen.place is Place.RUNNING)
        is_exact &= all(seen.place is not Place.ARRIVING for seen in live)
        used = stats.kv_used_blocks
        if is_exact:
            require(used == len(held), Invariant.USED, used, "instead of", len(held))
        else:
            require(used >= len(held), Invariant.USED, used, "less than", len(held))
        self._used = _used(stats)
        self._running = _running_of(live)


def _used(stats: SchedulerStats) -> dict[str, int]:
    return {name: tenant.kv_used_blocks for name, tenant in stats.tenants.items()}


def _running_of(live: Sequence[Seen]) -> Counter[str]:
    # Who is on its way in has a place already, which a limit that is lowered doesn't take from it.
    in_batch = (Place.RUNNING, Place.ARRIVING)
    return Counter(seen.tenant for seen in live if seen.place in in_batch)


_STATES = ("waiting", "running", "swapped")
