"""Which blocks nothing may touch, since a copy is reading or writing them."""

from collections.abc import Iterable
from dataclasses import dataclass

from tidegate_engine.core.plan import StepPlan, SwapCopy
from tidegate_engine.executor.base import Capacity, ExecutorError


class BlockError(ExecutorError):
    """A plan touches a block that there isn't, or that an open swap reads or writes.

    Attributes:
        block: Its number, on the device or on the host as the message says.
    """

    def __init__(self, who: str, kind: str, block: int, problem: str) -> None:
        super().__init__(f"{who}: {kind} block {block} {problem}")
        self.block = block


class OpenSwaps:
    """Swaps whose fences haven't passed. A plan is checked against them before any of it begins."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._open: dict[int, SwapCopy] = {}
        self._device: set[int] = set()
        self._host: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, plan: StepPlan) -> None:
        """Open the plan's swaps, once nothing in it touches a block of an open one.

        Raises:
            BlockError: Something does, or names a block that there isn't.
            ExecutorError: A fence is open already, a swap's blocks don't pair up, or the plan waits
                for a fence and none is open.
        """
        swaps = (*plan.swap_out, *plan.swap_in)
        if not (swaps or self._open or plan.copies):
            if plan.num_open_fences and not plan.rows:
                raise ExecutorError(f"step {plan.step}: waits for a fence, but none is open")
            return
        device = _Blocks("device", self._capacity.num_blocks, {*self._device})
        host = _Blocks("host", self._capacity.num_host_blocks, {*self._host})
        fences = {*self._open}
        for swap in swaps:
            who = f"step {plan.step}: swap {swap.fence} of request {swap.request_id}"
            self._check_pairing(who, swap, fences)
            device.claim(who, swap.device_blocks)
            host.claim(who, swap.host_blocks)
        for copy in plan.copies:
            device.check(f"step {plan.step}: copy", copy)
        for row in plan.rows:
            if not device.in_swaps.isdisjoint(row.block_ids) and not row.is_padding:
                device.check(f"step {plan.step}: row of request {row.request_id}", row.block_ids)
        self._open |= {swap.fence: swap for swap in swaps}
        self._device, self._host = device.in_swaps, host.in_swaps

    def end(self, fence: int) -> SwapCopy:
        """Close a swap: its blocks may be used."""
        swap = self._open.pop(fence)
        self._device.difference_update(swap.device_blocks)
        self._host.difference_update(swap.host_blocks)
        return swap

    @staticmethod
    def _check_pairing(who: str, swap: SwapCopy, fences: set[int]) -> None:
        if swap.fence in fences:
            raise ExecutorError(f"{who}: its fence is open already")
        fences.add(swap.fence)
        sizes = (len(swap.device_blocks), len(swap.host_blocks))
        if sizes[0] != sizes[1]:
            raise ExecutorError(f"{who}: {sizes[0]} device blocks for {sizes[1]} host blocks")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of one memory, while a plan is checked."""

    kind: str
    count: int
    in_swaps: set[int]

    def claim(self, who: str, blocks: Iterable[int]) -> None:
        """Give blocks to a swap."""
        for block in blocks:
            self.check(who, (block,))
            self.in_swaps.add(block)

    def check(self, who: str, blocks: Iterable[int]) -> None:
        """Raise if there isn't such a block, or a swap has it."""
        for block in blocks:
            if not 0 <= block < self.count:
                raise BlockError(who, self.kind, block, f"isn't in [0, {self.count})")
            if block in self.in_swaps:
                raise BlockError(who, self.kind, block, "belongs to an open swap")
