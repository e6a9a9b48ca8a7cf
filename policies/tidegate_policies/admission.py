"""The watermark gate: KV usage levels that close and open admission and start preemption."""

import enum

from tidegate_policies.snapshot import WatermarkRule


class Watermark(enum.StrEnum):
    """What KV usage allows.

    GREEN: everything. YELLOW: no admission above a tenant's nominal. RED: as YELLOW, and borrowers
    are preempted until usage is down at the low watermark.
    """

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


class WatermarkGate:
    """The state of one block pool against its watermarks, with hysteresis after RED."""

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

    def observe(self, used_blocks: int) -> Watermark:
        """Return the state at this usage; RED lasts until usage is down at the low watermark."""
        if used_blocks >= self.high_blocks:
            self.state = Watermark.RED
        elif self.state is not Watermark.RED or used_blocks <= self.low_blocks:
            self.state = Watermark.GREEN if used_blocks < self.low_blocks else Watermark.YELLOW
        return self.state
