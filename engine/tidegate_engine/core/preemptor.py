"""Who is taken out of the batch, for whom, and what becomes of its KV.

Every preemption has one of three causes: a higher tier waits (displaced), a tenant wants its own
blocks back (reclaimed), or memory ran short (pressure). What it takes is planned before anybody is
touched; what it frees is kept for whom it was freed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from math import inf

from tidegate_engine.core.books import Books
from tidegate_engine.core.decisions import Decision, Reason, Verdict
from tidegate_engine.core.request import PreemptionKey
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.step_time import StepFeatures
from tidegate_policies.admission import Watermark
from tidegate_policies.preemption import (
    Cause,
    Mode,
    ModeChoice,
    Shield,
    VictimCandidate,
    choose_pressure_victim,
    plan_victims,
)

_PASSING = frozenset(
    {
        Shield.IN_QUANTUM,
        Shield.ABOUT_TO_FINISH,
        Shield.PREFILL_NEARLY_DONE,
        Shield.UNDER_FLOOR,
    }
)
"""Protections that end by themselves."""

_REASONS = {
    Cause.DISPLACED: Reason.DISPLACED,
    Cause.RECLAIMED: Reason.RECLAIMED,
    Cause.PRESSURE: Reason.PRESSURE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a waiting request lacks.

    Attributes:
        blocks: Device blocks that have to be free for it.
        needs_slot: Whether it lacks a place in the batch, too.
        is_within_nominal: Whether the blocks are its tenant's own.
    """

    seq: Sequence
    blocks: int
    needs_slot: bool
    is_within_nominal: bool


@dataclass(frozen=True, slots=True)
class _Option:
    """A running request that may be taken out.

    Attributes:
        frees_slot: Whether its place in the batch may be taken.
        frees_blocks: Whether its blocks may be taken.
    """

    seq: Sequence
    candidate: VictimCandidate
    frees_slot: bool
    frees_blocks: bool


class Preemptor:
    """Takes requests out of the batch.

    Attributes:
        preempted: Requests taken out in this step, in order.
    """

    def __init__(self, books: Books) -> None:
        """Work on the scheduler's own state."""
        self.preempted: dict[Sequence, None] = {}
        self._memory = books.memory
        self._running = books.running
        self._tenants = books.tenants
        self._forecast = books.forecast
        self._gate = books.gate
        self._step_times = books.step_times
        self._shares = books.shares
        self._modes = ModeChoice()
        self._decisions: list[Decision] = []
        self._now = 0.0
        self._seen = -1
        self._found: list[Sequence] = []

    def begin_step(self, decisions: list[Decision], now: float) -> None:
        """Begin to decide for a step; decisions are appended."""
        self.preempted = {}
        self._seen = -1
        self._decisions = decisions
        self._now = now

    def relieve(self) -> None:
        """Hold usage against the watermarks; above the high one, borrowers leave down to the low.

        The last borrower stays: it would come back at once, as nobody else borrows. Nor does
        anybody leave before a lower tier whose requests are protected only for a moment.
        """
        while self._gate.observe() is Watermark.RED:
            borrowers = self._borrowers()
            shields = self._shields(borrowers)
            lowest = _yielding(borrowers, shields, _PASSING)
            options = [seq for seq in lowest if shields[seq] is Shield.NONE]
            if len(borrowers) < 2 or not options:
                break
            self._take_out(self._under_pressure(options), Cause.PRESSURE, None)
            self._press()

    def make_room_to_grow(self, seq: Sequence) -> None:
        """Take out who has to yield until a running request may have its next block.

        Afterwards the request has been taken out itself, or may grow, or waits for copies, or
        there is nobody who may yield.
        """
        memory, tenant = self._memory, seq.tenant
        while seq.phase is Phase.RUNNING:
            if memory.what_if({}).can_take(tenant.name, 1, free=memory.free_in_time(seq)):
                return
            options = self._who_yields_to(seq)
            if not options:
                return
            victim = self._under_pressure(options)
            reclaims = tenant.rule.preemption.reclaims
            is_reclaim = reclaims and memory.ledger.fits_nominal(tenant.name, 1)
            is_at_cap = memory.ledger.used(tenant.name) >= memory.ledger.cap(tenant.name)
            cause = Cause.RECLAIMED if is_reclaim else Cause.PRESSURE
            self._take_out(victim, cause, None if victim is seq else seq, blocks=1)
            if not (is_reclaim or is_at_cap):
                self._press()

    def make_room_for(self, wish: Wish) -> bool:
        """Take out whom it takes to let a waiting request in: as few as are enough, or nobody.

        Returns:
            Whether anybody was taken out.
        """
        options = list(self._options_for(wish))
        by_id = {option.candidate.request_id: option for option in options}

        def is_enough(victims: Ordered[VictimCandidate]) -> bool:
            return self._is_enough(wish, [by_id[victim.request_id] for victim in victims])

        victims = plan_victims([option.candidate for option in options], is_enough=is_enough)
        if not victims:
            return False
        lacks_own_blocks = self._lacks_own_blocks(wish)
        chosen = [by_id[victim.request_id] for victim in victims]
        blocks = self._blocks_without(wish, [option for option in chosen if option.frees_blocks])
        for option in chosen:
            is_reclaim = lacks_own_blocks and option.frees_blocks
            cause = Cause.RECLAIMED if is_reclaim else Cause.DISPLACED
            self._take_out(option.seq, cause, wish.seq, blocks=blocks)
        self._gate.observe()
        return True

    # -- whom ------------------------------------------------------------------------------------

    def _borrowers(self) -> list[Sequence]:
        """Return the running requests that hold borrowed blocks.

        Those are each tenant's newest ones of its lowest tiers.
        """
        if self._seen == self._running.version:
            return self._found
        left: dict[str, int] = {}
        leaving: dict[str, Counter[int]] = {}
        found: list[Sequence] = []
        everybody = [*self._running, *self._running.arriving]
        everybody.sort(key=lambda s: (-s.tenant.tier_value, s.admission), reverse=True)
        for seq in everybody:
            tenant = seq.tenant.name
            if tenant not in left:
                left[tenant] = self._memory.borrowed(tenant)
                leaving[tenant] = Counter()
            if left[tenant] <= 0:
                continue
            if seq.phase is Phase.RUNNING:
                found.append(seq)
            # What several share becomes free with the last of them.
            left[tenant] -= self._memory.payers.count_let_go(seq, leaving[tenant])
        self._seen, self._found = self._running.version, found
        return found

    def _shields(self, sequences: Iterable[Sequence]) -> dict[Sequence, Shield]:
        return {seq: self._shield(seq) for seq in sequences}

    def _candidate(self, seq: Sequence) -> VictimCandidate:
        tenant = seq.tenant
        borrowed, weight = self._memory.borrowed(tenant.name), tenant.rule.weight
        swap, recompute = self._costs(seq)
        return VictimCandidate(
            request_id=seq.request_id,
            tenant=tenant.name,
            tier_value=tenant.tier_value,
            over_share=borrowed / weight if weight else inf,
            backlog=len(tenant.queue) / weight if weight else inf,
            blocks=self._memory.pool.count_freed(seq.block_table),
            seconds=min(swap, recompute),
            admission=seq.admission,
        )

    def _who_yields_to(self, seq: Sequence) -> list[Sequence]:
        """Return who may yield so that a running request can grow: of the lowest tier there is.

        Protections of the moment give way before anybody of a higher tier does; the cap, when
        nobody else is left; who isn't preemptible never yields. Only for blocks that are its
        tenant's own does anybody of a higher tier yield.
        """
        ledger, tenant = self._memory.ledger, seq.tenant
        if ledger.used(tenant.name) >= ledger.cap(tenant.name):
            among = [s for s in self._running if s.tenant.name == tenant.name]
        else:
            is_own = ledger.fits_nominal(tenant.name, 1)
            among = [
                s for s in self._borrowers() if is_own or s.tenant.tier_value <= tenant.tier_value
            ]
        shields = self._shields(among)
        weak = _yielding(among, shields, _PASSING)
        return weak or _yielding(among, shields, _PASSING | {Shield.AT_CAP})

    def _options_for(self, wish: Wish) -> Iterator[_Option]:
        """Yield whom a waiting request may have taken out, and what of them."""
        tenant = wish.seq.tenant
        reclaims = wish.is_within_nominal and tenant.rule.preemption.reclaims
        borrowers = dict.fromkeys(self._borrowers())
        for seq in self._running:
            is_lower = tenant.tier.preempts_lower and seq.tenant.tier_value < tenant.tier_value
            frees_blocks = seq in borrowers and (is_lower or reclaims)
            frees_slot = is_lower and wish.needs_slot
            if (frees_blocks or frees_slot) and self._shield(seq) is Shield.NONE:
                yield _Option(seq, self._candidate(seq), frees_slot, frees_blocks)

    def _is_enough(self, wish: Wish, victims: Ordered[_Option]) -> bool:
        """Simulate: would the request get in if these were taken out?"""
        memory, seq = self._memory, wish.seq
        if wish.needs_slot and not any(option.frees_slot for option in victims):
            return False
        # Whoever is taken out for its slot frees blocks, too, but they are kept for its tenant.
        leaving = [option for option in victims if option.frees_blocks]
        freed = memory.pool.count_freed([b for o in leaving for b in o.seq.block_table])
        ledger = memory.what_if(self._count_released(leaving))
        free = memory.free_in_time(seq) + freed
        blocks = self._blocks_without(wish, leaving)
        if not ledger.can_take(seq.tenant.name, blocks, free=free):
            return False
        # While nobody else borrows, the watermarks gate nobody.
        if wish.is_within_nominal or not ledger.has_borrowers:
            return True
        kept = memory.what_if(self._count_released(victims)).kept_from(seq.tenant.name)
        usage = memory.num_settled - freed
        return self._gate.lets_in(seq, blocks, usage=usage, kept=kept)

    def _blocks_without(self, wish: Wish, leaving: Iterable[_Option]) -> int:
        """Return the blocks that a wish takes once these have left."""
        return wish.blocks + self._memory.count_lost(wish.seq, (o.seq for o in leaving))

    def _count_released(self, victims: Iterable[_Option]) -> dict[str, int]:
        """Return the blocks that each tenant no longer holds without these requests."""
        released: Counter[str] = Counter()
        leaving: dict[str, Counter[int]] = {}
        for option in victims:  # what several of a tenant share is let go with the last
            name = option.candidate.tenant
            returned = leaving.setdefault(name, Counter())
            released[name] += self._memory.payers.count_let_go(option.seq, returned)
        return released

    def _under_pressure(self, options: Ordered[Sequence]) -> Sequence:
        by_id = {seq.request_id: seq for seq in options}
        return by_id[choose_pressure_victim(map(self._candidate, options)).request_id]

    def _lacks_own_blocks(self, wish: Wish) -> bool:
        """Tell whether a tenant is to have blocks of its own back, not only a place."""
        memory, tenant = self._memory, wish.seq.tenant
        if not (wish.is_within_nominal and tenant.rule.preemption.reclaims):
            return False
        free, in_time = memory.free_in_time(wish.seq), memory.what_if({})
        return not in_time.can_take(tenant.name, wish.blocks, free=free)

    def _press(self) -> None:
        """Note that the pool ran short: admission had counted on room that was needed."""
        self._gate.is_pressed = True
        self._forecast.lengths.note_preemption()

    def _shield(self, seq: Sequence) -> Shield:
        is_at_floor = False
        if seq.is_under_floor:
            tier = self._tenants.tier_of(seq.tenant)
            share = self._shares.share(tier.value, self._now)
            is_at_floor = 100 * share <= tier.reserved_percent
        return seq.shield(is_tier_at_floor=is_at_floor)

    # -- how -------------------------------------------------------------------------------------

    def _costs(self, seq: Sequence) -> tuple[float, float]:
        """Return what swapping `seq` out and in, and what computing it again takes, in seconds."""
        num_blocks = self._memory.pool.blocks_for(seq.computed_tokens)
        queued = self._memory.flights.num_blocks
        per_block = self._memory.flights.seconds_per_block
        pool = self._memory.pool
        surviving = len(seq.block_table) - pool.count_freed(seq.block_table)
        lost = seq.computed_tokens - surviving * pool.block_size
        recompute = self._step_times.predict(
            StepFeatures(prefill_tokens=max(0, lost), decodes=0, context_tokens=0, prefill_pairs=0)
        )
        return per_block * (2 * num_blocks + queued), recompute

    def _take_out(
        self, seq: Sequence, cause: Cause, beneficiary: Sequence | None, *, blocks: int = 0
    ) -> None:
        """Take a running request out, and keep what it frees for its beneficiary."""
        memory, tenant = self._memory, seq.tenant
        swap, recompute = self._costs(seq)
        mode = self._modes.choose(
            tenant.rule.preemption.mode,
            swap_seconds=swap,
            recompute_seconds=recompute,
            has_host_room=seq.computed_tokens > 0 and memory.has_host_room(seq),
        )
        self._running.remove(seq)
        seq.charged_tokens = max(seq.charged_tokens, seq.computed_tokens)
        if mode is Mode.SWAP:
            memory.begin_swap_out(seq, beneficiary, wanted=blocks)
            seq.phase = Phase.SWAPPED
            tenant.swapped += 1
        else:
            freed = memory.release(seq)
            seq.phase = Phase.WAITING
            tenant.preempted += 1
            if beneficiary is not None:
                memory.reserve(beneficiary, min(memory.lacking(beneficiary, blocks), freed))
        self._note(seq, cause, mode, beneficiary)

    def _note(self, seq: Sequence, cause: Cause, mode: Mode, beneficiary: Sequence | None) -> None:
        seq.preemptions += 1
        seq.is_under_floor = False
        seq.tenant.totals.preemptions[PreemptionKey(cause, mode)] += 1
        self._tenants.reconsider(seq.tenant)
        self._tenants.follow(seq.tenant)
        self._tenants.tier_of(seq.tenant).resumable[seq] = None
        self.preempted[seq] = None
        self._decisions.append(
            Decision(
                seq.request_id,
                seq.tenant.name,
                Verdict.PREEMPTED,
                _REASONS[cause],
                *(() if beneficiary is None else _described(beneficiary)),
            )
        )


def _described(beneficiary: Sequence) -> tuple[str, str, str]:
    """Return what a decision says of a beneficiary."""
    tenant = beneficiary.tenant
    return beneficiary.request_id, tenant.name, tenant.tier.name


def _yielding(
    among: Iterable[Sequence], shields: Mapping[Sequence, Shield], given_way: frozenset[Shield]
) -> list[Sequence]:
    """Return who may yield of the lowest tier that has anybody who may.

    Args:
        among: Running requests.
        shields: What protects each of them.
        given_way: Protections that don't count.
    """
    weak = [seq for seq in among if shields[seq] is Shield.NONE or shields[seq] in given_way]
    lowest = min((seq.tenant.tier_value for seq in weak), default=0)
    of_lowest = [seq for seq in weak if seq.tenant.tier_value == lowest]
    free = [seq for seq in of_lowest if shields[seq] is Shield.NONE]
    return free or of_lowest
