"""Who is taken out of the batch, for whom, and what becomes of its KV.

Every preemption has one of three causes: a higher tier waits (displaced), a tenant wants its own
blocks back (reclaimed), or memory ran short (pressure). What it takes is planned before anybody is
touched; what it frees is kept for whom it was freed.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from tidegate_engine.core.decisions import Decision, Reason, Verdict
from tidegate_engine.core.forecast import Forecast
from tidegate_engine.core.kv_gate import KvGate
from tidegate_engine.core.kv_memory import KvMemory
from tidegate_engine.core.request import PreemptionKey
from tidegate_engine.core.running import Running
from tidegate_engine.core.sequence import Phase, Sequence
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.core.tenants import TenantTable
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
from tidegate_policies.tiers import TierShares

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
    frees_slot: bool = True
    frees_blocks: bool = True


class Preemptor:
    """Takes requests out of the batch.

    Attributes:
        preempted: Requests taken out in this step, in order.
    """

    def __init__(
        self,
        *,
        memory: KvMemory,
        running: Running,
        tenants: TenantTable,
        forecast: Forecast,
        gate: KvGate,
        step_times: StepTimeModel,
        shares: TierShares,
    ) -> None:
        """Work on the scheduler's own state."""
        self.preempted: dict[Sequence, None] = {}
        self._memory = memory
        self._running = running
        self._tenants = tenants
        self._forecast = forecast
        self._gate = gate
        self._step_times = step_times
        self._shares = shares
        self._modes = ModeChoice()
        self._decisions: list[Decision] = []
        self._now = 0.0

    def begin_step(self, decisions: list[Decision], now: float) -> None:
        """Begin to decide for a step; decisions are appended."""
        self.preempted = {}
        self._decisions = decisions
        self._now = now

    def relieve(self) -> None:
        """Hold usage against the watermarks; above the high one, borrowers leave down to the low.

        The last borrower stays: it would come back at once, as nobody else borrows.
        """
        memory = self._memory
        while memory.observe() is Watermark.RED:
            options = [o for o in self._borrowers() if self._shield(o.seq) is Shield.NONE]
            if len(options) < 2:
                break
            self._take_out(self._under_pressure(options), Cause.PRESSURE, None)
        if memory.num_settled <= memory.gate.low_blocks:
            self._gate.is_pressed = False

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
            is_reclaim = memory.ledger.fits_nominal(tenant.name, 1)
            cause = Cause.RECLAIMED if is_reclaim else Cause.PRESSURE
            self._take_out(victim, cause, None if victim is seq else seq, blocks=1)

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
        cause = self._cause(wish)
        for victim in victims:
            self._take_out(by_id[victim.request_id].seq, cause, wish.seq, blocks=wish.blocks)
        self._memory.observe()
        return True

    # -- whom ------------------------------------------------------------------------------------

    def _borrowers(self) -> list[_Option]:
        """Return the running requests that hold borrowed blocks: each tenant's newest ones."""
        excess: dict[str, int] = {}
        options: list[_Option] = []
        for seq in reversed(list(self._running)):
            name = seq.tenant.name
            left = excess.setdefault(name, self._memory.borrowed(name))
            if left > 0:
                options.append(_Option(seq, self._candidate(seq)))
                excess[name] = left - len(seq.block_table)
        return options

    def _candidate(self, seq: Sequence) -> VictimCandidate:
        tenant = seq.tenant
        borrowed, weight = self._memory.borrowed(tenant.name), tenant.rule.weight
        swap, recompute = self._costs(seq)
        return VictimCandidate(
            request_id=seq.request_id,
            tenant=tenant.name,
            tier_value=tenant.tier_value,
            over_share=borrowed / weight if weight else float("inf"),
            blocks=self._memory.pool.count_freed(seq.block_table),
            seconds=min(swap, recompute),
            admission=seq.admission,
        )

    def _who_yields_to(self, seq: Sequence) -> list[_Option]:
        """Return who may yield so that a running request can grow, the least protected.

        The protections of moments give way, then the cap; who isn't preemptible never yields.
        """
        memory, name = self._memory, seq.tenant.name
        if memory.ledger.used(name) >= memory.ledger.cap(name):
            own = [s for s in reversed(list(self._running)) if s.tenant is seq.tenant]
            options = [_Option(s, self._candidate(s)) for s in own]
        else:
            options = self._borrowers()
        shields = {option.seq: self._shield(option.seq) for option in options}
        for allowed in (
            {Shield.NONE},
            {*Shield} - {Shield.AT_CAP, Shield.NOT_PREEMPTIBLE},
            {*Shield} - {Shield.NOT_PREEMPTIBLE},
        ):
            unprotected = [option for option in options if shields[option.seq] in allowed]
            if unprotected:
                return unprotected
        return []

    def _options_for(self, wish: Wish) -> Iterator[_Option]:
        """Yield whom a waiting request may have taken out, and what of them."""
        tenant = wish.seq.tenant
        reclaims = wish.is_within_nominal and tenant.rule.preemption.reclaims
        borrowers = {option.seq: option for option in self._borrowers()}
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
        tables: dict[str, list[int]] = {}
        for option in victims:
            if option.frees_blocks:
                tables.setdefault(option.candidate.tenant, []).extend(option.seq.block_table)
        # Blocks are shared inside a tenant only; what all victims share is freed with the last.
        released = {name: memory.pool.count_freed(table) for name, table in tables.items()}
        freed = sum(released.values())
        ledger = memory.what_if(released)
        free = memory.free_in_time(seq) + freed
        if not ledger.can_take(seq.tenant.name, wish.blocks, free=free):
            return False
        # While nobody else borrows, the watermarks gate nobody.
        is_ungated = wish.is_within_nominal or not ledger.has_borrowers
        return is_ungated or memory.gate.has_room(memory.num_settled - freed, wish.blocks)

    def _under_pressure(self, options: Ordered[_Option]) -> Sequence:
        victim = choose_pressure_victim([option.candidate for option in options])
        return next(o.seq for o in options if o.candidate.request_id == victim.request_id)

    def _cause(self, wish: Wish) -> Cause:
        lacks_blocks = wish.blocks > self._memory.free_for(wish.seq)
        return Cause.RECLAIMED if wish.is_within_nominal and lacks_blocks else Cause.DISPLACED

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
        queued = self._memory.num_copying
        per_block = self._step_times.costs.swap_block_seconds
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
        wanted = 0
        if beneficiary is not None:
            kept = beneficiary.reserved_blocks + beneficiary.incoming_blocks
            wanted = max(0, blocks - kept)
        if mode is Mode.SWAP:
            expected = memory.begin_swap_out(seq, beneficiary)
            seq.phase = Phase.SWAPPED
            tenant.swapped += 1
            if beneficiary is not None:
                memory.expect(beneficiary, min(wanted, expected))
        else:
            freed = memory.release(seq)
            seq.phase = Phase.WAITING
            tenant.preempted += 1
            if beneficiary is not None:
                memory.reserve(beneficiary, min(wanted, freed))
        self._note(seq, cause, mode, beneficiary)

    def _note(self, seq: Sequence, cause: Cause, mode: Mode, beneficiary: Sequence | None) -> None:
        seq.preemptions += 1
        seq.is_under_floor = False
        seq.tenant.totals.preemptions[PreemptionKey(cause, mode)] += 1
        self._tenants.unpark(seq.tenant)
        self._tenants.tier_of(seq.tenant).resumable[seq] = None
        if cause is Cause.PRESSURE:
            self._gate.is_pressed = True
            self._forecast.lengths.note_preemption()
        self.preempted[seq] = None
        self._decisions.append(
            Decision(
                seq.request_id,
                seq.tenant.name,
                Verdict.PREEMPTED,
                _REASONS[cause],
                "" if beneficiary is None else beneficiary.request_id,
            )
        )
