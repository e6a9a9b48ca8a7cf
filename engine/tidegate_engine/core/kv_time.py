"""KV blocks times the time that they are held: what KV memory costs a tenant.

Counted in whole block-microseconds, so that what tenants held sums up to what the engine did.
"""

from dataclasses import dataclass

MICROSECONDS = 1_000_000
"""In a second."""


@dataclass(slots=True)
class HeldBlocks:
    """Blocks that somebody holds, and how long it held them; a change costs the same at any size.

    A block that is held from a to b counts b - a: the times of releases, less those of takings. So
    their sum is all there is to keep, and what is held still counts up to now.

    Attributes:
        blocks: Held now.
        taken_at: Sum of the times at which they were taken, less those of releases.
    """

    blocks: int = 0
    taken_at: int = 0

    def change(self, blocks: int, now: int) -> None:
        """Book so many blocks more, or less, in microseconds `now`."""
        self.blocks += blocks
        self.taken_at += blocks * now

    def absorb(self, other: "HeldBlocks") -> None:
        """Book as its own what somebody else has held, and holds."""
        self.blocks += other.blocks
        self.taken_at += other.taken_at

    def block_microseconds(self, now: int) -> int:
        """Return how long blocks were held until `now`, all together."""
        return self.blocks * now - self.taken_at


class KvClock:
    """The time of the scheduler's books, and how long all blocks together were held.

    Attributes:
        now: In microseconds; never goes back.
        block_microseconds: Of the whole engine, until `now`.
    """

    def __init__(self) -> None:
        self.now = 0
        self.block_microseconds = 0

    def advance(self, now: float, *, num_held: int) -> None:
        """Go on to `now`, in seconds; so many blocks were held since the last call."""
        microseconds = max(self.now, round(now * MICROSECONDS))
        self.block_microseconds += num_held * (microseconds - self.now)
        self.now = microseconds
