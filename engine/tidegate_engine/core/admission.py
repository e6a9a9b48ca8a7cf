"""Who joins the batch next: by tier, then tenant, then request, if KV and places allow.

What the `KvGate` lets in comes in. What a waiting request lacks may be taken from running ones by
the `Preemptor`; what that frees is promised to the request, which comes first until it is in.
"""

from math import inf

from tidegate_engine.core.batch import in_service_order, places, share_out
from tidegate_engine.core.books import Books
from tidegate_engine.core.candidates import MAX_BACKFILL, Candidates
from tidegate_engine.core.decisions import Decision, Reason, Verdict
from tidegate_engine.core.kv_gate import FINAL, OPEN
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import CachedPrompt
from tidegate_engine.core.preemptor import Preemptor, Wish
from tidegate_engine.core.queues import TierQueue
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.step_time import StepFeatures
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.rules import StopPolicy


class Admission:
    """Lets waiting requests into the batch.

    Attributes:
        admitted: Requests let in with this step, in order.
        cached: Of those let in for the first time, what was found of their prompts.
        hopeless: Requests for which the policy in force leaves no room any more.
        wake_at: When a held tier is to be looked at again; None = none is held.
    """

    def __init__(self, books: Books, preemptor: Preemptor) -> None:
        """Work on the scheduler's own state."""
        self.admitted: list[str] = []
        self.cached: list[CachedPrompt] = []
        self.hopeless: dict[Sequence, None] = {}
        self.wake_at: float | None = None
        self._memory = books.memory
        self._running = books.running
        self._tenants = books.tenants
        self._forecast = books.forecast
        self._gate = books.gate
        self._step_times = books.step_times
        self._itl = books.itl
        self._shares = books.shares
        self._preemptor = preemptor
        self._admissions = 0
        self._promised: dict[Sequence, None] = {}
        self._floor_heads: list[Sequence] = []
        self._limits = EngineLimits()
        self._budget = 0
        self._now = 0.0
        self._top_value = 0
        self._may_borrow = True
        self._decisions: list[Decision] = []

    def begin_step(self, decisions: list[Decision], now: float) -> None:
        """Begin to decide for a step; decisions are appended."""
        self.admitted = []
        self.cached = []
        self.hopeless = {}
        self.wake_at = None
        self._floor_heads = []
        self._may_borrow = True
        self._decisions = decisions
        self._now = now
        self._itl.begin_step()

    def run(self, budget: int) -> None:
        """Let in who may come in, given the prompt tokens that the step may compute."""
        self._budget = budget
        with_work = [tier.value for tier in self._tenants.tiers.values() if tier.has_work]
        if not with_work:
            return
        self._top_value = max(with_work)
        self._keep_promises()
        for tier in self._below_floor():
            while self._is_below_floor(tier) and self._serve(tier, under_floor=True):
                pass
        for value in sorted(self._tenants.tiers, reverse=True):
            tier = self._tenants.tiers[value]
            if tier.has_work:
                self._serve(tier)

    def forget(self, seq: Sequence) -> None:
        """Take back the place that is kept for a request that doesn't wait for it any more."""
        self._promised.pop(seq, None)

    def obey(self, limits: EngineLimits) -> None:
        """Be under these limits from now on.

        Promises for which the policy in force has no place are taken back, the newest first.
        """
        self._limits = limits
        for seq in reversed(list(self._promised)):
            if self._places_left() < 0 or seq.tenant.rule.stop is StopPolicy.HOLD:
                self._give_up(seq)

    def _keep_promises(self) -> None:
        """Let in those for whom others were taken out, before anybody else can take their place.

        A promise holds no longer than until the copies for its sake have ended: should the request
        still not get in then, what was kept for it is for all.
        """
        for seq in list(self._promised):
            reason = self._try(seq, is_head=False, may_borrow=True)
            if reason in OPEN:
                self._start(seq, reason)
            elif reason in FINAL or not self._memory.flights:
                self._give_up(seq)

    def _give_up(self, seq: Sequence) -> None:
        del self._promised[seq]
        self._memory.unreserve(seq)

    # -- tiers -----------------------------------------------------------------------------------

    def _below_floor(self) -> list[TierQueue]:
        """Return the tiers with work that have got less than their reserved share."""
        tiers = self._tenants.tiers
        with_floor = [value for value, tier in tiers.items() if tier.reserved_percent]
        return [
            tiers[value]
            for value in sorted(with_floor, reverse=True)
            if self._is_below_floor(tiers[value])
        ]

    def _is_below_floor(self, tier: TierQueue) -> bool:
        return tier.has_work and self._shares.is_below_floor(
            tier.value,
            reserved_percent=tier.reserved_percent,
            now=self._now,
            # A request that runs for longer than expected owes nothing.
            committed={k: max(0.0, cost) for k, cost in self._running.committed_cost.items()},
        )

    def _serve(self, tier: TierQueue, *, under_floor: bool = False) -> bool:
        """Let in what may come in of one tier; for its floor's sake, one request.

        Returns:
            Whether any was.
        """
        preempted_now = self._preemptor.preempted
        candidates = Candidates(
            tier,
            self._tenants,
            self._now,
            # Not who is still on the way out, nor who has left for somebody in this very step.
            resumable=[s for s in tier.resumable if not s.fence and s not in preempted_now],
            is_held=self._is_held(tier),
        )
        heads: list[Sequence] = []
        capped: dict[Tenant, list[Sequence]] = {}
        limit = (True, inf)
        served = False
        while (seq := candidates.next()) is not None:
            if seq in self._promised:
                candidates.settle(Reason.NO_BLOCKS)
                continue
            # Nobody is displaced for a request that is looked at past a blocked one, and nobody
            # borrows past it who is ahead of it by more than it costs.
            may_borrow = self._may_borrow and seq.tenant.key <= limit
            reason = self._try(seq, is_head=not heads, may_borrow=may_borrow)
            if reason in OPEN:
                served = True
                self._pass([*heads, *capped.get(seq.tenant, ())])
                self._start(seq, Reason.UNDER_FLOOR if under_floor else reason)
            elif reason is Reason.OUT_OF_MEMORY:
                self.hopeless[seq] = None
            elif seq not in self._promised:
                self._hold(seq, reason)
                if reason is Reason.AT_CAP:
                    capped.setdefault(seq.tenant, []).append(seq)
                else:
                    heads.append(seq)
                    limit = min(limit, self._overtaken_at(seq))
            candidates.settle(reason)
            is_full = reason in (Reason.NO_SLOT, Reason.ITL_TARGET)
            if is_full or len(heads) > MAX_BACKFILL or (served and under_floor):
                break
        candidates.close()
        if under_floor:
            self._floor_heads += heads[:1]
        elif heads:
            # Lower tiers get only what is their tenants' own: backfill never crosses tiers.
            self._may_borrow = False
        return served

    def _pass(self, heads: list[Sequence]) -> None:
        """Note that a request is let in past these, and past those that are due for their floor."""
        for head in {**dict.fromkeys(heads), **dict.fromkeys(self._floor_heads)}:
            head.skips += 1

    def _overtaken_at(self, head: Sequence) -> tuple[bool, float]:
        """Return the place in their tier's order up to which tenants may go past a request."""
        is_spare, counter = head.tenant.key
        weight = head.tenant.rule.weight or 1
        return is_spare, counter + self._forecast.expected_cost(head) / weight

    def _hold(self, seq: Sequence, reason: Reason) -> None:
        if seq.skips >= MAX_BACKFILL and reason is not Reason.AT_CAP:
            # It was passed often enough: what is freed next is for it.
            self._may_borrow = False
        if seq.held_for is not reason:
            seq.held_for = reason
            self._decisions.append(Decision(seq.request_id, seq.tenant.name, Verdict.HELD, reason))

    def _is_held(self, tier: TierQueue) -> bool:
        """Tell whether the first arrivals of a tier wait for more, to fill a batch."""
        window = tier.wait_window_seconds
        if window is None:
            window = self._limits.wait_window_seconds
        if not window or tier.first_wait_at is None:
            return False
        # Who is released together is read together, and the step under way has to end.
        reading = self._step_times.predict(
            StepFeatures(
                prefill_tokens=tier.num_tokens,
                decodes=len(self._running.decoding),
                context_tokens=self._running.context_tokens,
                prefill_pairs=0,
            )
        )
        release_at = min(tier.first_wait_at + window, tier.first_latest_start - reading)
        is_filled = tier.num_queued >= self._places_left()
        if self._now >= release_at or is_filled or self._top_value > tier.value:
            tier.end_wait()
            return False
        self.wake_at = release_at if self.wake_at is None else min(self.wake_at, release_at)
        return True

    # -- requests ----------------------------------------------------------------------------------

    def _try(self, seq: Sequence, *, is_head: bool, may_borrow: bool) -> Reason:
        """Decide about one request; take others out for it where it may have that."""
        if not self._gate.clip(seq):
            return Reason.OUT_OF_MEMORY
        is_promised = seq in self._promised
        if not is_promised and self._itl.keeps_out(seq):
            return Reason.ITL_TARGET
        needs_slot = not is_promised and self._places_left() <= 0
        may_displace = is_head and self._may_displace(seq)
        is_full = seq.tenant.is_full_with(self._promised_to_others(seq))
        if is_full or (needs_slot and not may_displace):
            return Reason.AT_CAP if is_full else Reason.NO_SLOT
        if not seq.host_table and not self._may_read(seq):
            return Reason.PARTIAL_PREFILLS
        need = self._memory.need(seq)
        reason = self._gate.judge(seq, need, may_borrow=may_borrow)
        if (reason in OPEN and not needs_slot) or reason in FINAL:
            return reason
        wish = Wish(
            seq=seq,
            blocks=need.additional,
            needs_slot=needs_slot,
            is_within_nominal=self._gate.fits_nominal(seq, need),
        )
        may_take = may_displace or self._may_reclaim(wish)
        return self._make_room(wish, reason) if may_take else reason

    def _make_room(self, wish: Wish, reason: Reason) -> Reason:
        """Take others out for a request that lacks blocks, a place or both, if that is enough."""
        seq = wish.seq
        if not self._preemptor.make_room_for(wish):
            return Reason.NO_SLOT if wish.needs_slot else reason
        need = self._memory.need(seq)
        reason = self._gate.judge(seq, need, may_borrow=True)
        if reason not in OPEN:  # what was taken arrives with the end of a copy
            self._promised[seq] = None
            self._memory.keep_free(seq, need.additional)
        return reason

    def _may_reclaim(self, wish: Wish) -> bool:
        reclaims = wish.is_within_nominal and wish.seq.tenant.rule.preemption.reclaims
        return reclaims and not wish.needs_slot and self._memory.ledger.has_borrowers

    def _may_displace(self, seq: Sequence) -> bool:
        tenant = seq.tenant
        return tenant.tier.preempts_lower and self._running.has_below(tenant.tier_value)

    def _may_read(self, seq: Sequence) -> bool:
        """Tell whether the prompt of `seq` may be begun beside those that are half read.

        Those of lower tiers don't count: they come after it.
        """
        ahead = [
            other
            for other in in_service_order(self._running.prefilling)
            if other.tenant.tier_value >= seq.tenant.tier_value
        ]
        together = [*ahead, seq]
        if sum(other.pending_tokens for other in together) <= self._budget:
            return True
        if not self._budget:
            return False
        most = self._limits.max_partial_prefills
        shares = share_out(together, budget=self._budget, max_partial=most)
        if sum(1 for other in together if shares[other] < other.pending_tokens) <= most:
            return True
        # Nor do the further prompts of a tenant keep others from beginning their first, nor those
        # of whoever has more service before it: they stand still meanwhile.
        reading = {other.tenant for other in ahead}
        if len(reading) >= 2 * most or seq.tenant in reading:
            return False
        value, key = seq.tenant.tier_value, seq.tenant.key
        before = [tenant for tenant in reading if tenant.tier_value == value and tenant.key <= key]
        return len(before) < most

    def _promised_to_others(self, seq: Sequence) -> int:
        """Return how many places are kept for other requests of the same tenant."""
        name = seq.tenant.name
        return sum(1 for other in self._promised if other.tenant.name == name and other is not seq)

    def _places_left(self) -> int:
        return places(self._limits) - self._running.num_places - len(self._promised)

    def _start(self, seq: Sequence, reason: Reason) -> None:
        tenant = seq.tenant
        is_resumed = bool(seq.preemptions)
        self._admissions += 1
        self._promised.pop(seq, None)
        seq.admission = self._admissions
        seq.admitted_tokens = seq.num_tokens
        seq.charged_cost = 0.0
        seq.skips = 0
        seq.held_for = None
        seq.is_under_floor = reason is Reason.UNDER_FLOOR
        seq.expected_cost = self._forecast.expected_cost(seq)
        self._decisions.append(
            Decision(
                seq.request_id,
                tenant.name,
                Verdict.RESUMED if is_resumed else Verdict.ADMITTED,
                reason,
            )
        )
        if is_resumed:
            del self._tenants.tier_of(tenant).resumable[seq]
        else:
            self._tenants.dequeue(seq)
        if seq.host_table:
            self._bring_in(seq)
            return
        if is_resumed:
            tenant.preempted -= 1
        found = self._memory.begin(seq)
        prompt_found = min(found, len(seq.request.prompt_ids))
        if prompt_found and not is_resumed:
            self.cached.append(CachedPrompt(seq.request_id, prompt_found))
        tenant.totals.cached_tokens += max(0, prompt_found - seq.charged_tokens)
        seq.charged_tokens = max(seq.charged_tokens, prompt_found)
        self._take_in(seq)

    def _bring_in(self, seq: Sequence) -> None:
        if self._memory.begin_swap_in(seq):
            self._running.expect(seq)
            return
        self.join(seq)

    def join(self, seq: Sequence) -> None:
        """Take a request into the batch whose KV is back on the device."""
        self._running.stop_expecting(seq)
        seq.tenant.swapped -= 1
        self._take_in(seq)

    def _take_in(self, seq: Sequence) -> None:
        self._running.add(seq)
        self._itl.note_start(seq)
        self._tenants.follow(seq.tenant)
        self.admitted.append(seq.request_id)
