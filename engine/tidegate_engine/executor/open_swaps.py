"""Which blocks nothing may touch, since a copy is reading or writing them."""

from collections import Counter
from collections.abc import Container, Iterable
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
    """Swaps whose fences haven't passed. A plan is checked against them before any of it begins.

    A device block that a swap reads may be read by others, as shared prefixes are, but not written.
    One that a swap writes may be touched by nobody. Host blocks are never shared.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._open: dict[int, SwapCopy] = {}
        self._read: Counter[int] = Counter()
        self._written: set[int] = set()
        self._host: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, plan: StepPlan) -> None:
        """Open the plan's swaps, once nothing in it conflicts with an open one.

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
        check = _Check(self._capacity, Counter(self._read), {*self._written}, {*self._host})
        check.plan(plan, fences={*self._open})
        self._open |= {swap.fence: swap for swap in swaps}
        self._read, self._written, self._host = check.read, check.written, check.host

    def end(self, fence: int) -> SwapCopy:
        """Close a swap: its blocks may be used."""
        swap = self._open.pop(fence)
        self._host.difference_update(swap.host_blocks)
        if self._written.issuperset(swap.device_blocks):
            self._written.difference_update(swap.device_blocks)
        else:
            self._read -= Counter(swap.device_blocks)
        return swap


@dataclass(frozen=True, slots=True)
class _Check:
    """The blocks of swaps, while a plan is checked.

    Attributes:
        read: Device blocks that swaps read, with how many do.
        written: Device blocks that swaps write.
        host: Host blocks that swaps read or write.
    """

    capacity: Capacity
    read: Counter[int]
    written: set[int]
    host: set[int]

    def plan(self, plan: StepPlan, fences: set[int]) -> None:
        """Raise if anything in the plan conflicts with a swap; else hold its own swaps' blocks."""
        for swap in (*plan.swap_out, *plan.swap_in):
            who = f"step {plan.step}: swap {swap.fence} of request {swap.request_id}"
            _check_pairing(who, swap, fences)
            for block in swap.host_blocks:
                self._check(who, "host", block, self.capacity.num_host_blocks, taken=(self.host,))
                self.host.add(block)
        for swap in plan.swap_out:
            who = f"step {plan.step}: swap {swap.fence} of request {swap.request_id}"
            self._reads(who, swap.device_blocks)
            self.read.update(swap.device_blocks)
        for swap in plan.swap_in:
            who = f"step {plan.step}: swap {swap.fence} of request {swap.request_id}"
            for block in swap.device_blocks:
                self._writes(who, [block])
                self.written.add(block)
        for copy in plan.copies:
            self._reads(f"step {plan.step}: copy", [copy.source])
            self._writes(f"step {plan.step}: copy", [copy.target])
        size = self.capacity.block_size
        for row in plan.rows:
            if not row.is_padding:
                who = f"step {plan.step}: row of request {row.request_id}"
                if not self.written.isdisjoint(row.block_ids):
                    self._reads(who, row.block_ids)
                self._writes(who, row.block_ids[row.start // size : (row.end - 1) // size + 1])

    def _reads(self, who: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._check(who, "device", block, self.capacity.num_blocks, taken=(self.written,))

    def _writes(self, who: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            taken = (self.written, self.read)
            self._check(who, "device", block, self.capacity.num_blocks, taken=taken)

    @staticmethod
    def _check(
        who: str, kind: str, block: int, count: int, *, taken: Iterable[Container[int]]
    ) -> None:
        if not 0 <= block < count:
            raise BlockError(who, kind, block, f"isn't in [0, {count})")
        if any(block in blocks for blocks in taken):
            raise BlockError(who, kind, block, "belongs to an open swap")


def _check_pairing(who: str, swap: SwapCopy, fences: set[int]) -> None:
    if swap.fence in fences:
        raise ExecutorError(f"{who}: its fence is open already")
    fences.add(swap.fence)
    sizes = (len(swap.device_blocks), len(swap.host_blocks))
    if sizes[0] != sizes[1]:
        raise ExecutorError(f"{who}: {sizes[0]} device blocks for {sizes[1]} host blocks")
