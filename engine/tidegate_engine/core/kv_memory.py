"""Who may take KV blocks now: the block pool, the quotas and the watermarks in one place."""

from collections.abc import Collection

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.sequence import Sequence
from tidegate_policies.admission import Watermark, WatermarkGate
from tidegate_policies.quota import KvLedger
from tidegate_policies.snapshot import PolicySnapshot, WatermarkRule

RESUME_QUANTUM_TOKENS = 16
"""A preempted request borrows again only when its context and so many tokens more fit."""


class KvMemory:
    """The KV blocks of one engine and the rules by which sequences get them."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        """Start with every block free and nobody's own."""
        self.pool = BlockPool(num_blocks=num_blocks, block_size=block_size)
        self._ledger = KvLedger(num_blocks)
        self._gate = WatermarkGate(WatermarkRule(), num_blocks=num_blocks)

    def apply_policy(self, snapshot: PolicySnapshot) -> None:
        """Put quotas and watermarks in force; what runs is not touched here."""
        self._ledger.set_nominal({r.tenant: r.kv_nominal_percent for r in snapshot.tenants})
        self._gate.apply_rule(snapshot.watermarks)

    @property
    def watermark(self) -> Watermark:
        """The watermark state as last observed."""
        return self._gate.state

    def observe(self) -> Watermark:
        """Hold the usage of now against the watermarks; once a step, for it moves their state."""
        return self._gate.observe(self.pool.num_used)

    def cap_tokens(self, tenant: str) -> int:
        """Return the longest context that `tenant` could ever hold."""
        return self._ledger.cap(tenant) * self.pool.block_size

    def used_blocks(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds."""
        return self._ledger.used(tenant)

    def borrowed_blocks(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds above its nominal."""
        return self._ledger.borrowed(tenant)

    def can_ever_hold(self, seq: Sequence) -> bool:
        """Tell whether the context fits when nobody else borrows."""
        return len(seq.token_ids) <= self.cap_tokens(seq.tenant)

    def can_admit(self, seq: Sequence, *, may_borrow: bool) -> bool:
        """Tell whether a waiting sequence may take the blocks of its whole context.

        While nobody borrows, the watermarks gate nobody: a context above them would wait for ever
        beside tenants that are always busy within their nominal.

        Args:
            seq: A waiting sequence.
            may_borrow: Whether the order of admission still lets borrowers in.
        """
        blocks = self.pool.blocks_for(len(seq.token_ids))
        if not self._ledger.can_take(seq.tenant, blocks, free=self.pool.num_free):
            return False
        if self._ledger.fits_nominal(seq.tenant, blocks):
            return True
        if not may_borrow:
            return False
        return not self._ledger.has_borrowers or self._is_borrowing_open(seq, blocks)

    def try_grow(self, seq: Sequence) -> bool:
        """Give a sequence the blocks that its tokens need, if it may have them.

        Returns:
            False, and nothing has changed, when it may not.
        """
        num_tokens = len(seq.token_ids)
        missing = self.pool.blocks_for(num_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if not self._ledger.can_take(seq.tenant, missing, free=self.pool.num_free):
            return False
        self._ledger.take(seq.tenant, self.pool.grow(seq.block_table, num_tokens=num_tokens))
        return True

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of a sequence."""
        self._ledger.give_back(seq.tenant, self.pool.release(seq.block_table))

    def check_invariants(self, sequences: Collection[Sequence]) -> None:
        """Verify block tables against pool and ledger.

        Raises:
            AssertionError: They disagree.
        """
        self.pool.check_invariants(seq.block_table for seq in sequences)
        used: dict[str, int] = {}
        for seq in sequences:
            used[seq.tenant] = used.get(seq.tenant, 0) + len(seq.block_table)
        self._ledger.check_invariants(used)

    def _is_borrowing_open(self, seq: Sequence, blocks: int) -> bool:
        used = self.pool.num_used
        if seq.preemptions:
            resumed = self.pool.blocks_for(len(seq.token_ids) + RESUME_QUANTUM_TOKENS)
            return used + resumed <= self._gate.low_blocks
        is_green = self.watermark is Watermark.GREEN and used < self._gate.low_blocks
        return is_green and used + blocks < self._gate.high_blocks
