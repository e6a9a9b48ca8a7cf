"""Whether the KV pool has room: usage levels that gate admission, and the peak to be expected."""

import enum
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from tidegate_policies.rules import WatermarkRule


class Watermark(enum.StrEnum):
    """What KV usage allows.

    GREEN: everything. YELLOW: no admission above a tenant's nominal. RED: as YELLOW, and borrowers
    are preempted until usage is down at the low watermark.
    """

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


class WatermarkGate:
    """The state of one block pool against its watermarks, with hysteresis both ways.

    Attributes:
        state: As of the last `observe`.
        low_blocks: Usage that closes the gate for borrowers, and down to which RED lasts.
        high_blocks: Usage that makes the gate RED; above `low_blocks`.
    """

    def __init__(self, rule: WatermarkRule, *, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.state = Watermark.GREEN
        self.apply_rule(rule)

    def apply_rule(self, rule: WatermarkRule) -> None:
        """Change the levels; the state follows at the next `observe`."""
        self.low_blocks = self._num_blocks * rule.low_percent // 100
        # In a small pool both may round to the same block, and then every admission would be RED.
        high_blocks = self._num_blocks * rule.high_percent // 100
        self.high_blocks = max(high_blocks, self.low_blocks + 1)
        # A gate that opens where it closed would admit and hold in turns, a block up, a block down.
        # At least one, so that an empty pool is always GREEN.
        self._reopening_blocks = max(1, self.low_blocks - self._num_blocks // 100)

    def would_open(self, used_blocks: int) -> bool:
        """Tell whether usage that falls to this level opens the gate."""
        return used_blocks < self._reopening_blocks

    def observe(self, used_blocks: int) -> Watermark:
        """Return the state at this usage.

        RED lasts until usage is down at the low watermark; GREEN returns only once usage is
        below that by more than 1 % of the pool (in pools under 100 blocks: once it is below).
        """
        if used_blocks >= self.high_blocks:
            self.state = Watermark.RED
        elif used_blocks < self._reopening_blocks:
            self.state = Watermark.GREEN
        elif self.state is Watermark.RED:
            if used_blocks <= self.low_blocks:
                self.state = Watermark.YELLOW
        elif used_blocks >= self.low_blocks:
            self.state = Watermark.YELLOW
        return self.state


class PredictedPeak:
    """The most KV that some requests will hold together, in tokens, alone and with one more.

    Each grows by one token per step and leaves with its last, so that the sum is at its largest
    when one of them ends. In order of remaining length, longest first, the k-th ends beside the
    k - 1 before it, each of which has grown as much: their peak is the largest of those sums.

    Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025),
    section 3.3. Here the sums are kept, so that asking for one request more is logarithmic: one
    that is put among them changes no sum before it, and adds what it holds, and its growth for
    one more, to each behind it.
    """

    def __init__(self, occupied: Sequence[int], remaining: Sequence[int]) -> None:
        """Look at requests as they are now.

        Args:
            occupied: Tokens that each holds.
            remaining: Output tokens that each is still expected to produce, in the same order.

        Raises:
            ValueError: The two differ in length.
        """
        if len(occupied) != len(remaining):
            raise ValueError(
                f"remaining: {len(remaining)} lengths for the {len(occupied)} requests of occupied"
            )
        ranked = sorted(range(len(remaining)), key=remaining.__getitem__, reverse=True)
        self._ranks = [-remaining[i] for i in ranked]
        self._held = [0, *accumulate(occupied[i] for i in ranked)]
        totals = [
            held - rank * count
            for count, (held, rank) in enumerate(
                zip(self._held[1:], self._ranks, strict=True), start=1
            )
        ]
        with_more = [total - rank for total, rank in zip(totals, self._ranks, strict=True)]
        self._before = [0, *accumulate(totals, max)]
        self._behind = [*accumulate(reversed(with_more), max)][::-1]

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def tokens(self) -> int:
        """The peak of these requests."""
        return self._before[-1]

    def with_one_more(self, occupied: int, remaining: int) -> int:
        """Return the peak if a request that holds so much, and will produce so much, joins them."""
        place = bisect_left(self._ranks, -remaining)
        own = self._held[place] + occupied + remaining * (place + 1)
        behind = self._behind[place] + occupied if place < len(self._behind) else 0
        return max(self._before[place], own, behind)
