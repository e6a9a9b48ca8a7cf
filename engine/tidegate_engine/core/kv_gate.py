"""Whether a waiting request may have the KV blocks that it needs, and which rule says no.

Within its tenant's nominal a request is let in whatever others hold; above it, only while the
watermark gate is open and the predicted peak of all that run stays under the high watermark.
"""

from collections.abc import Callable
from typing import NamedTuple

from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.forecast import Forecast
from tidegate_engine.core.kv_memory import KvMemory, Need
from tidegate_engine.core.running import Running
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.admission import PredictedPeak, Watermark

RESUME_QUANTUM_TOKENS = 16
"""A preempted request borrows again only when its context and so many tokens more fit."""

OPEN = (Reason.WITHIN_NOMINAL, Reason.BORROWING)
"""Reasons to let a request in."""

FINAL = (Reason.AT_CAP, Reason.PREDICTED_PEAK, Reason.BEHIND_HEAD)
"""Reasons not to that no preemption would change."""


class _Group(NamedTuple):
    """What some running requests will need together.

    Attributes:
        peak: Without regard to blocks that they share.
        final_blocks: Blocks of each at its end, summed up, shared ones once.
        shared_blocks: By how much the sum of their tables exceeds the blocks in them.
    """

    peak: PredictedPeak
    final_blocks: int
    shared_blocks: int


class KvGate:
    """Quotas, watermarks and the predicted peak, held against one request at a time.

    Attributes:
        is_pressed: Whether memory ran short and nothing has got better since: no request has
            ended, and usage is not down at the low watermark.
    """

    def __init__(self, *, memory: KvMemory, running: Running, forecast: Forecast) -> None:
        """Work on the scheduler's own state."""
        self.is_pressed = False
        self._seen = -1
        self._groups: dict[str | int | None, _Group] = {}
        self._memory = memory
        self._running = running
        self._forecast = forecast

    def begin_step(self) -> None:
        """Look at the running requests anew: they have grown."""
        self._seen = -1

    def observe(self) -> Watermark:
        """Hold usage against the watermarks: once a step, and when somebody was taken out."""
        memory = self._memory
        state = memory.observe()
        if memory.num_settled <= memory.gate.low_blocks:
            self.is_pressed = False
        return state

    def clip(self, seq: Sequence) -> bool:
        """Shorten what a policy in force leaves too little room for.

        Returns:
            Whether the context as it is has room at all.
        """
        memory, tenant = self._memory, seq.tenant
        most = memory.cap_tokens_of(tenant)
        if seq.max_tokens > most + 1:  # the last output token is never cached
            before = seq.most_blocks
            seq.clip(most + 1, block_size=memory.pool.block_size)
            self._running.commit_fewer(seq, before - seq.most_blocks)
        return seq.num_tokens <= most

    def judge(self, seq: Sequence, need: Need, *, may_borrow: bool) -> Reason:
        """Hold a request against quotas, the predicted peak and the watermarks."""
        memory, tenant = self._memory, seq.tenant
        ledger = memory.ledger
        has_blocks = ledger.can_take(tenant.name, need.additional, free=memory.free_for(seq))
        if self.fits_nominal(seq, need):
            return Reason.WITHIN_NOMINAL if has_blocks else Reason.NO_BLOCKS
        if not tenant.is_preemptible:
            return Reason.AT_CAP
        used = ledger.used(tenant.name)
        if used and used + self._final_blocks(seq) - need.shared > ledger.cap(tenant.name):
            own = ledger.has_own_limit(tenant.name)
            return Reason.AT_CAP if own else Reason.PREDICTED_PEAK
        if not may_borrow:
            return Reason.BEHIND_HEAD
        # While nobody else borrows, or will when it has grown, nothing gates the one who does.
        nominal = ledger.nominal(tenant.name)
        is_gated = ledger.has_borrowers or self._others_of(tenant).final_blocks > nominal
        closed = self._close(seq, need) if is_gated else None
        if closed is not None:
            return closed
        return Reason.BORROWING if has_blocks else Reason.NO_BLOCKS

    def fits_nominal(self, seq: Sequence, need: Need) -> bool:
        """Tell whether `seq` and its tenant's others stay within nominal until their ends."""
        ledger, tenant = self._memory.ledger, seq.tenant
        nominal = ledger.nominal(tenant.name)
        if not tenant.is_preemptible:
            committed = sum(one.committed_blocks for one in tenant.in_tiers)
            return committed + seq.most_blocks <= nominal
        final = self._final_blocks(seq) - need.shared
        if not ledger.fits_nominal(tenant.name, final):
            return False
        others = self._others_of(tenant)
        if final + others.final_blocks <= nominal:
            return True
        return self._peak_with(others, seq, need) <= nominal

    def lets_in(self, seq: Sequence, blocks: int, *, usage: int, kept: int) -> bool:
        """Tell whether a borrower of `blocks` would get in.

        Args:
            seq: The borrower.
            blocks: What it lacks.
            usage: Blocks in use then.
            kept: Blocks of others' unused nominal that it may not borrow then.
        """
        gate = self._memory.gate
        if self._is_over(seq, self._memory.need(seq), gate.high_blocks - kept):
            return False
        is_open = gate.would_open(usage)
        is_pressed = self.is_pressed and usage > gate.low_blocks
        return not is_pressed and self._level(seq, blocks, usage, is_open=is_open) is None

    def _close(self, seq: Sequence, need: Need) -> Reason | None:
        """Return what closes the way to borrowed blocks, or None; the lasting reason first."""
        memory = self._memory
        kept = memory.ledger.kept_from(seq.tenant.name)
        if self._is_over(seq, need, memory.gate.high_blocks - kept):
            return Reason.PREDICTED_PEAK
        if self.is_pressed:
            return Reason.WATERMARK
        usage = memory.num_settled
        # What this step has admitted already counts, too.
        is_open = memory.gate.state is Watermark.GREEN and usage < memory.gate.low_blocks
        return self._level(seq, need.additional, usage, is_open=is_open)

    def _is_over(self, seq: Sequence, need: Need, room: int) -> bool:
        """Tell whether the predicted peak with `seq` doesn't stay under `room` blocks."""
        beside = self._beside(seq)
        # With nothing else running, nothing is to be predicted.
        return len(beside.peak) > 0 and self._peak_with(beside, seq, need) >= room

    def _level(self, seq: Sequence, blocks: int, usage: int, *, is_open: bool) -> Reason | None:
        gate = self._memory.gate
        if seq.preemptions:
            quantum = self._memory.pool.blocks_for(RESUME_QUANTUM_TOKENS)
            is_resumable = usage + blocks + quantum <= gate.low_blocks
            return None if is_resumable else Reason.NOT_RESUMABLE
        has_room = is_open and usage + blocks < gate.high_blocks
        return None if has_room else Reason.WATERMARK

    def _peak_with(self, group: _Group, seq: Sequence, need: Need) -> int:
        """Return the blocks that a group and `seq` will hold at their peak."""
        counted_twice = group.shared_blocks + need.shared
        return self._forecast.blocks_with(group.peak, seq) - counted_twice

    def _others_of(self, tenant: Tenant) -> _Group:
        return self._group(tenant.name, lambda other: other.tenant.name == tenant.name)

    def _beside(self, seq: Sequence) -> _Group:
        """Return who runs and counts against `seq`: lower tiers will yield to it."""
        tenant = seq.tenant
        if not tenant.tier.preempts_lower:
            return self._group(None, lambda _other: True)
        value = tenant.tier_value
        return self._group(value, lambda other: other.tenant.tier_value >= value)

    def _group(self, key: str | int | None, belongs: Callable[[Sequence], bool]) -> _Group:
        """Look at some of the running requests, once as long as nobody joins or leaves."""
        if self._seen != self._running.version:
            self._seen, self._groups = self._running.version, {}
        group = self._groups.get(key)
        if group is None:
            members = [s for s in (*self._running, *self._running.arriving) if belongs(s)]
            shared = self._count_shared(members)
            # Asked for of a tenant's own requests only.
            final = sum(map(self._final_blocks, members)) if isinstance(key, str) else 0
            group = _Group(self._forecast.peak_of(members), final - shared, shared)
            self._groups[key] = group
        return group

    def _count_shared(self, members: list[Sequence]) -> int:
        """Return how many blocks are counted too often if each counts all of its own."""
        if not self._memory.pool.num_shared:
            return 0
        tables = [seq.block_table for seq in members]
        return sum(map(len, tables)) - len(set().union(*tables))

    def _final_blocks(self, seq: Sequence) -> int:
        return self._memory.pool.blocks_for(self._forecast.final_tokens(seq))
