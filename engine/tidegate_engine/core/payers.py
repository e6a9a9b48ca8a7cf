"""Which tenants pay for a KV block, and since when."""

from collections import Counter
from collections.abc import Collection, Iterable

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.common_blocks import CommonBlocks
from tidegate_engine.core.kv_time import KvClock
from tidegate_engine.core.sequence import Sequence
from tidegate_engine.core.tenants import Tenant
from tidegate_policies.quota import KvLedger


class Payers:
    """Books what tenants hold: in the ledger, and as time that blocks were held.

    Attributes:
        clock: The time of these books.
        common: Blocks that several tenants may hold; the others have one holder at most.
    """

    def __init__(self, pool: BlockPool, ledger: KvLedger) -> None:
        """Book blocks of `pool` in `ledger`."""
        self.clock = KvClock()
        self.common = CommonBlocks()
        self._pool = pool
        self._ledger = ledger

    @property
    def num_paid(self) -> int:
        """Blocks in use, each as often as tenants pay for it."""
        return self._pool.num_used + self.common.num_extra

    def advance(self, now: float) -> None:
        """Go on to `now`: what is taken and given back from here on is so from then on."""
        self.clock.advance(now, num_held=self.num_paid)

    def count_held(self, seq: Sequence, blocks: Iterable[int]) -> int:
        """Return how many of the cached blocks found for `seq` its tenant pays for already."""
        if seq.keys.is_common:
            return self.common.count_held(seq.tenant.name, blocks)
        return sum(1 for block in blocks if self._pool.references(block))

    def count_let_go(self, seq: Sequence, returned: "Counter[int]") -> int:
        """Return for how many blocks the tenant of `seq` would not pay any more without it.

        Args:
            seq: A running request.
            returned: References that are taken as given back before; these are added to them.
        """
        name, table = seq.tenant.name, seq.block_table
        if self._is_common(name, table):
            return self.common.count_let_go(name, table, returned)
        return self._pool.count_freed(table, returned)

    def take(self, seq: Sequence, blocks: Iterable[int], *, taken: int) -> None:
        """Book blocks that `seq` holds now, `taken` of which nobody held before."""
        tenant = seq.tenant
        if seq.keys.is_common:
            taken = self.common.take(tenant.name, blocks)
        self._book(tenant, taken)

    def give_back(self, tenant: Tenant, blocks: Collection[int], *, freed: int) -> None:
        """Book blocks that a request holds no more, `freed` of which nobody holds now."""
        if self._is_common(tenant.name, blocks):
            freed = self.common.give_back(tenant.name, blocks)
        self._book(tenant, -freed)

    def _is_common(self, tenant: str, blocks: Collection[int]) -> bool:
        """Tell whether blocks that a request of `tenant` holds may have other holders."""
        # A request has all its blocks in common, or none.
        return self.common.has(tenant, next(iter(blocks), None))

    def _book(self, tenant: Tenant, blocks: int) -> None:
        if blocks < 0:
            self._ledger.give_back(tenant.name, -blocks)
        else:
            self._ledger.take(tenant.name, blocks)
        tenant.totals.held.change(blocks, self.clock.now)
