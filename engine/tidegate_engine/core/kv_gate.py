"""Whether a waiting request may have the KV blocks that it needs, and which rule says no.

Within its tenant's nominal a request is let in whatever others hold; above it, only while the
watermark gate is open and the predicted peak of all that run stays under the high watermark.
"""

from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.forecast import Forecast
from tidegate_engine.core.kv_memory import KvMemory, Need
from tidegate_engine.core.running import Running
from tidegate_engine.core.sequence import Sequence
from tidegate_policies.admission import Watermark

RESUME_QUANTUM_TOKENS = 16
"""A preempted request borrows again only when its context and so many tokens more fit."""

OPEN = (Reason.WITHIN_NOMINAL, Reason.BORROWING)
"""Reasons to let a request in."""

FINAL = (Reason.AT_CAP, Reason.PREDICTED_PEAK, Reason.BEHIND_HEAD)
"""Reasons not to that no preemption would change."""


class KvGate:
    """Quotas, watermarks and the predicted peak, held against one request at a time.

    Attributes:
        is_pressed: Whether memory ran short and nothing has got better since: no request has
            ended, and usage is not down at the low watermark.
    """

    def __init__(self, *, memory: KvMemory, running: Running, forecast: Forecast) -> None:
        """Work on the scheduler's own state."""
        self.is_pressed = False
        self._memory = memory
        self._running = running
        self._forecast = forecast

    def clip(self, seq: Sequence) -> bool:
        """Shorten what a policy in force leaves too little room for.

        Returns:
            Whether the context as it is has room at all.
        """
        memory, tenant = self._memory, seq.tenant
        most = memory.cap_tokens(tenant.name, is_preemptible=tenant.is_preemptible)
        if seq.max_tokens > most + 1:  # the last output token is never cached
            seq.clip(most + 1, block_size=memory.pool.block_size)
        return seq.num_tokens <= most

    def judge(self, seq: Sequence, need: Need, *, may_borrow: bool) -> Reason:
        """Hold a request against quotas, watermarks and the predicted peak."""
        memory, tenant = self._memory, seq.tenant
        ledger = memory.ledger
        has_blocks = ledger.can_take(tenant.name, need.additional, free=memory.free_for(seq))
        if self.fits_nominal(seq, need):
            return Reason.WITHIN_NOMINAL if has_blocks else Reason.NO_BLOCKS
        used, cap = ledger.used(tenant.name), ledger.cap(tenant.name)
        if not tenant.is_preemptible or (
            used and used + self._final_blocks(seq) - need.shared > cap
        ):
            return Reason.AT_CAP
        if not may_borrow:
            return Reason.BEHIND_HEAD
        # While nobody else borrows, the watermarks gate nobody.
        if ledger.has_borrowers:
            closed = self._gate(seq, need)
            if closed is not None:
                return closed
        return Reason.BORROWING if has_blocks else Reason.NO_BLOCKS

    def fits_nominal(self, seq: Sequence, need: Need) -> bool:
        """Tell whether `seq` and its tenant's others stay within nominal until their ends."""
        ledger, tenant = self._memory.ledger, seq.tenant
        nominal = ledger.nominal(tenant.name)
        if not tenant.is_preemptible:
            return tenant.committed_blocks + seq.most_blocks <= nominal
        final = self._final_blocks(seq) - need.shared
        if not ledger.fits_nominal(tenant.name, final):
            return False
        own = [s for s in (*self._running, *self._running.arriving) if s.tenant is tenant]
        if final + sum(self._final_blocks(other) for other in own) <= nominal:
            return True
        return self._forecast.peak_blocks([*own, seq]) <= nominal

    def _gate(self, seq: Sequence, need: Need) -> Reason | None:
        """Return what closes the way to borrowed blocks, or None."""
        memory = self._memory
        usage = memory.num_settled
        if self.is_pressed:
            return Reason.WATERMARK
        if seq.preemptions:
            quantum = memory.pool.blocks_for(RESUME_QUANTUM_TOKENS)
            if usage + need.additional + quantum > memory.gate.low_blocks:
                return Reason.NOT_RESUMABLE
        elif (
            memory.gate.state is not Watermark.GREEN
            or usage >= memory.gate.low_blocks  # by what this step has admitted already
            or usage + need.additional >= memory.gate.high_blocks
        ):
            return Reason.WATERMARK
        room = memory.gate.high_blocks - memory.ledger.kept_from(seq.tenant.name)
        beside = [other for other in self._running if self._stays(other, seq)]
        beside += self._running.arriving
        if not beside:
            return None
        if self._forecast.peak_blocks([*beside, seq]) >= room:
            return Reason.PREDICTED_PEAK
        return None

    def _stays(self, other: Sequence, seq: Sequence) -> bool:
        """Tell whether a running request counts against `seq`: lower tiers will yield to it."""
        tenant = seq.tenant
        return not tenant.tier.preempts_lower or other.tenant.tier_value >= tenant.tier_value

    def _final_blocks(self, seq: Sequence) -> int:
        return self._memory.pool.blocks_for(self._forecast.final_tokens(seq))
