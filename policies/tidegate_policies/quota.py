"""Whose KV blocks are whose: nominal quota, and what is borrowed above it.

Nominal blocks are the tenant's own: nobody of any tier may take them, used or not. Whatever a
tenant holds above its nominal is borrowed.
"""

from collections.abc import Mapping


class KvLedger:
    """KV blocks that each tenant uses, against its nominal.

    Invariant (`check_invariants`): usage is never negative, and the unused nominal that is kept
    free for its owners is the sum over the tenants.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._nominal: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._unused_nominal = 0

    def set_nominal(self, percent: Mapping[str, int]) -> None:
        """Replace the nominal quotas, in percent of the pool; blocks are rounded down."""
        self._nominal = {
            tenant: self._num_blocks * share // 100 for tenant, share in percent.items() if share
        }
        self._unused_nominal = sum(self._unused(tenant) for tenant in self._nominal)

    def used(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds."""
        return self._used.get(tenant, 0)

    def nominal(self, tenant: str) -> int:
        """Return the blocks that are `tenant`'s own."""
        return self._nominal.get(tenant, 0)

    def borrowed(self, tenant: str) -> int:
        """Return the blocks that `tenant` holds above its nominal."""
        return max(0, self.used(tenant) - self.nominal(tenant))

    @property
    def has_borrowers(self) -> bool:
        """Whether any tenant holds more than its nominal."""
        return any(self.borrowed(tenant) for tenant in self._used)

    def cap(self, tenant: str) -> int:
        """Return the most blocks that `tenant` could ever hold: all but the others' nominal."""
        return self._num_blocks - sum(self._nominal.values()) + self.nominal(tenant)

    def fits_nominal(self, tenant: str, blocks: int) -> bool:
        """Tell whether `tenant` stays within its nominal with so many more blocks."""
        return self.used(tenant) + blocks <= self.nominal(tenant)

    def can_take(self, tenant: str, blocks: int, *, free: int) -> bool:
        """Tell whether `tenant` may take so many of the `free` blocks.

        What would be left has to cover the unused nominal of all tenants. A tenant within its own
        nominal needs only that the blocks exist.
        """
        if blocks > free:
            return False
        if self.fits_nominal(tenant, blocks):
            return True
        own = self._unused(tenant)
        return free - blocks >= self._unused_nominal - own

    def take(self, tenant: str, blocks: int) -> None:
        """Book blocks that `tenant` was given."""
        self._book(tenant, blocks)

    def give_back(self, tenant: str, blocks: int) -> None:
        """Book blocks that `tenant` returned."""
        self._book(tenant, -blocks)

    def _book(self, tenant: str, blocks: int) -> None:
        self._unused_nominal -= self._unused(tenant)
        self._used[tenant] = self.used(tenant) + blocks
        self._unused_nominal += self._unused(tenant)
        if not self._used[tenant]:
            del self._used[tenant]

    def _unused(self, tenant: str) -> int:
        return max(0, self.nominal(tenant) - self.used(tenant))

    def check_invariants(self, used: Mapping[str, int]) -> None:
        """Verify the books against `used`, the block tables' own count by tenant.

        Raises:
            AssertionError: The books differ from the block tables, or from themselves.
        """
        if self._used != {tenant: n for tenant, n in used.items() if n}:
            raise AssertionError(f"the ledger says {self._used}, the block tables say {used}")
        unused = sum(self._unused(tenant) for tenant in self._nominal)
        if unused != self._unused_nominal:
            raise AssertionError(f"unused nominal is {unused}, booked {self._unused_nominal}")
