"""Blocks that requests of several tenants may hold at once, since these share their prefixes.

Each tenant pays for every block that it holds, once, as if it had the block for itself. So what one
holds, and may hold, depends on nobody else: sharing saves memory and computing, and no quota.
"""

from collections import Counter
from collections.abc import Iterable


class CommonBlocks:
    """How often each tenant holds each such block.

    Attributes:
        num_extra: By how much what the tenants hold exceeds the blocks that are held.
    """

    def __init__(self) -> None:
        self.num_extra = 0
        self._holders: dict[int, Counter[str]] = {}

    def has(self, tenant: str, block: int | None) -> bool:
        """Tell whether `tenant` holds a block as one that others may hold, too."""
        holders = self._holders.get(block) if self._holders and block is not None else None
        return holders is not None and tenant in holders

    def take(self, tenant: str, blocks: Iterable[int]) -> int:
        """Note one holding more of each block.

        Returns:
            How many of them `tenant` did not hold.
        """
        taken = 0
        for block in blocks:
            holders = self._holders.setdefault(block, Counter())
            if tenant not in holders:
                taken += 1
                self.num_extra += bool(holders)
            holders[tenant] += 1
        return taken

    def give_back(self, tenant: str, blocks: Iterable[int]) -> int:
        """Note one holding less of each block, all of which `tenant` holds.

        Returns:
            How many of them it doesn't hold any more.
        """
        given = 0
        for block in blocks:
            holders = self._holders[block]
            holders[tenant] -= 1
            if holders[tenant]:
                continue
            given += 1
            del holders[tenant]
            if holders:
                self.num_extra -= 1
            else:
                del self._holders[block]
        return given

    def count_held(self, tenant: str, blocks: Iterable[int]) -> int:
        """Return how many of the blocks `tenant` holds."""
        return sum(self.has(tenant, block) for block in blocks)

    def count_let_go(self, tenant: str, blocks: Iterable[int], returned: "Counter[int]") -> int:
        """Return how many blocks `tenant` would not hold any more without these holdings.

        Args:
            tenant: Who holds all of them.
            blocks: One holding each.
            returned: Holdings that are taken as given back before; these are added to them.
        """
        let_go = 0
        for block in blocks:
            returned[block] += 1
            let_go += returned[block] == self._holders[block][tenant]
        return let_go

    def check_invariants(self) -> None:
        """Verify the sum.

        Raises:
            AssertionError: It is wrong.
        """
        extra = sum(len(holders) - 1 for holders in self._holders.values())
        if extra != self.num_extra:
            raise AssertionError(
                f"{extra} blocks are held by a further tenant, not {self.num_extra}"
            )
