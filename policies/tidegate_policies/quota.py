"""Whose KV blocks are whose: nominal quota, borrowing above it, lending of what is unused.

Nominal blocks are the tenant's own. Whatever a tenant holds above its nominal is borrowed: it may
have to leave when an owner wants its nominal. Of an unused nominal, others may borrow the lendable
part; the rest stays free of borrowers, so that its owner finds it without taking anybody out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class BlocksNotHeldError(ValueError):
    """A tenant was to give back more KV blocks than it holds; nothing was booked."""

    def __init__(self, tenant: str, blocks: int, used: int) -> None:
        super().__init__(f"tenant {tenant!r} can't give back {blocks} KV blocks: it holds {used}")
        self.tenant = tenant
        self.blocks = blocks
        self.used = used


@dataclass(frozen=True, slots=True, kw_only=True)
class KvQuota:
    """One tenant's rights to KV blocks.

    Attributes:
        nominal_percent: Share of the pool that is the tenant's own.
        borrowing_limit_percent: Most that it may hold above that, in percent of the pool; None =
            no limit of its own.
        lendable_percent: Share of its unused nominal that others may borrow.
    """

    nominal_percent: int = 0
    borrowing_limit_percent: int | None = None
    lendable_percent: int = 100


class _Limits(NamedTuple):
    """A quota in blocks; immutable, so that copies of a ledger share it."""

    nominal: int
    cap: int
    lendable_percent: int
    has_own_limit: bool = False

    def kept(self, used: int) -> int:
        """Return the blocks that nobody may borrow while the tenant holds `used`."""
        unused = self.nominal - used
        return _unlendable(unused, self.lendable_percent) if unused > 0 else 0


class KvLedger:
    """KV blocks that each tenant holds, against its quota.

    A tenant without a quota has no nominal and may borrow without a limit of its own.

    Invariant (`check_invariants`): `num_borrowed` and the blocks kept from borrowers are the sums
    over the tenants. As long as the nominals fit in the pool, what a tenant lacks of its nominal is
    free or borrowed by somebody: free + borrowed = pool - sum of min(used, nominal), which is at
    least the sum of the unused nominals.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._limits: dict[str, _Limits] = {}
        self._without_quota = _Limits(0, num_blocks, 100)
        self._used: dict[str, int] = {}
        self._num_borrowed = 0
        self._num_kept = 0

    def set_quotas(self, quotas: Mapping[str, KvQuota]) -> None:
        """Replace all quotas; what tenants hold stays, even where it is above a lowered cap.

        Percentages of the pool are rounded down to blocks.
        """
        pool = self._num_blocks
        nominals = {tenant: pool * quota.nominal_percent // 100 for tenant, quota in quotas.items()}
        unlendables = {
            tenant: _unlendable(nominals[tenant], quota.lendable_percent)
            for tenant, quota in quotas.items()
        }
        # An owner that holds something leaves others even less than its lendable part, so that an
        # idle owner is the best case, and the sum over idle owners bounds what can be held.
        lent_at_most = pool - sum(unlendables.values())
        self._without_quota = _Limits(0, lent_at_most, 100)
        self._limits = {
            tenant: _limits(
                quota, pool, nominal=nominals[tenant], reachable=lent_at_most + unlendables[tenant]
            )
            for tenant, quota in quotas.items()
        }
        self._num_borrowed = self._count_borrowed()
        self._num_kept = self._count_kept()

    def used(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds."""
        return self._used.get(tenant, 0)

    def nominal(self, tenant: str) -> int:
        """Return the blocks that are `tenant`'s own."""
        return self._limits.get(tenant, self._without_quota).nominal

    def borrowed(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds above its nominal."""
        return max(0, self.used(tenant) - self.nominal(tenant))

    @property
    def num_borrowed(self) -> int:
        """Blocks that tenants hold above their nominal, all together."""
        return self._num_borrowed

    @property
    def has_borrowers(self) -> bool:
        """Whether any tenant holds more than its nominal."""
        return self._num_borrowed > 0

    def cap(self, tenant: str) -> int:
        """Return the most blocks that `tenant` could ever hold, with nobody else in the pool."""
        return self._limits.get(tenant, self._without_quota).cap

    def has_own_limit(self, tenant: str) -> bool:
        """Tell whether the cap is the tenant's own, not what the others leave of the pool."""
        return self._limits.get(tenant, self._without_quota).has_own_limit

    def fits_nominal(self, tenant: str, blocks: int) -> bool:
        """Tell whether `tenant` stays within its nominal with so many more blocks."""
        return self.used(tenant) + blocks <= self.nominal(tenant)

    def kept_from(self, tenant: str) -> int:
        """Return the blocks of the others' unused nominal that `tenant` may not borrow."""
        limits = self._limits.get(tenant, self._without_quota)
        return self._num_kept - limits.kept(self._used.get(tenant, 0))

    def available(self, tenant: str, free: int) -> int:
        """Return the most blocks that `tenant` may take now when `free` blocks are free.

        What it takes leaves free what is kept from it, even within its nominal: while that is lent
        out, the free blocks may be another owner's, and borrowers have to give back first. Above
        its nominal it stays at or below its cap, too.
        """
        limits = self._limits.get(tenant, self._without_quota)
        used = self._used.get(tenant, 0)
        unkept = free - self._num_kept + limits.kept(used)
        return max(0, min(limits.cap - used, unkept))

    def can_take(self, tenant: str, blocks: int, *, free: int) -> bool:
        """Tell whether so many blocks are `available`; asked for every block of every decode."""
        limits = self._limits.get(tenant, self._without_quota)
        used = self._used.get(tenant, 0)
        own_kept = limits.kept(used) if used < limits.nominal else 0
        is_available = blocks <= free - self._num_kept + own_kept and used + blocks <= limits.cap
        return is_available or not blocks

    def take(self, tenant: str, blocks: int) -> None:
        """Book blocks that `tenant` was given."""
        self._book(tenant, self._used.get(tenant, 0) + blocks)

    def give_back(self, tenant: str, blocks: int) -> None:
        """Book blocks that `tenant` returned.

        Raises:
            BlocksNotHeldError: It doesn't hold so many; nothing was booked.
        """
        used = self._used.get(tenant, 0)
        if blocks > used:
            raise BlocksNotHeldError(tenant, blocks, used)
        self._book(tenant, used - blocks)

    def what_if(self, released: Mapping[str, int]) -> "KvLedger":
        """Return a copy in which these tenants hold so many blocks less; this ledger is unchanged.

        Raises:
            BlocksNotHeldError: One of them doesn't hold so many.
        """
        copy = KvLedger(self._num_blocks)
        copy._limits = self._limits
        copy._without_quota = self._without_quota
        copy._used = self._used.copy()
        copy._num_borrowed = self._num_borrowed
        copy._num_kept = self._num_kept
        for tenant, blocks in released.items():
            copy.give_back(tenant, blocks)
        return copy

    def _book(self, tenant: str, used: int) -> None:
        limits = self._limits.get(tenant, self._without_quota)
        before = self._used.get(tenant, 0)
        nominal = limits.nominal
        if used >= nominal and before >= nominal:
            self._num_borrowed += used - before
        else:
            if used > nominal or before > nominal:
                self._num_borrowed += max(used, nominal) - max(before, nominal)
            if limits.lendable_percent < 100:
                self._num_kept += limits.kept(used) - limits.kept(before)
        if used:
            self._used[tenant] = used
        else:
            self._used.pop(tenant, None)

    def _count_borrowed(self) -> int:
        return sum(self.borrowed(tenant) for tenant in self._used)

    def _count_kept(self) -> int:
        return sum(
            limits.kept(self._used.get(tenant, 0)) for tenant, limits in self._limits.items()
        )

    def check_invariants(self, used: Mapping[str, int]) -> None:
        """Verify the books against `used`, the block tables' own count by tenant.

        Raises:
            AssertionError: The books differ from the block tables, or from themselves.
        """
        if self._used != {tenant: blocks for tenant, blocks in used.items() if blocks}:
            raise AssertionError(f"the ledger says {self._used}, the block tables say {used}")
        counted = self._count_borrowed(), self._count_kept()
        if counted != (self._num_borrowed, self._num_kept):
            raise AssertionError(
                f"borrowed and kept are {counted}, booked {self._num_borrowed, self._num_kept}"
            )


def _limits(quota: KvQuota, pool: int, *, nominal: int, reachable: int) -> _Limits:
    limit = quota.borrowing_limit_percent
    cap = reachable if limit is None else min(reachable, nominal + pool * limit // 100)
    return _Limits(nominal, max(nominal, cap), quota.lendable_percent, cap < reachable)


def _unlendable(blocks: int, lendable_percent: int) -> int:
    """Return what is left of an owner's unused blocks once the lendable part is rounded down."""
    return blocks - blocks * lendable_percent // 100
