"""Swaps whose fences have not passed, and what they will free."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tidegate_engine.core.plan import SwapCopy
from tidegate_engine.core.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class Flight:
    """A swap in flight.

    Attributes:
        num_leaving: Device blocks that are free once it has ended.
        num_promised: Of those, the ones that will be kept for the beneficiary.
        began_at: On the scheduler's clock.
        num_queued: Blocks of the swaps in flight when it began, its own included.
        beneficiary: For whom the device blocks of a swap-out are kept once they are free.
    """

    copy: SwapCopy
    seq: Sequence
    is_out: bool
    num_leaving: int = 0
    num_promised: int = 0
    began_at: float = 0.0
    num_queued: int = 0
    beneficiary: Sequence | None = None


class Flights:
    """All swaps in flight.

    Attributes:
        now: When the step under way was planned.
        num_leaving: Device blocks that they will free.
        seconds_per_block: What a swap takes, as far as was seen.
    """

    def __init__(self, seconds_per_block: float) -> None:
        """Start with none in flight.

        Args:
            seconds_per_block: What a swap takes for each block, to begin with.
        """
        self.now = 0.0
        self.num_leaving = 0
        self.seconds_per_block = seconds_per_block
        self._fences = 0
        self._open: dict[int, Flight] = {}
        self._leaving_of: Counter[str] = Counter()
        self._flown: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._open.values())

    @property
    def num_blocks(self) -> int:
        """Blocks that they move."""
        return sum(len(flight.copy.host_blocks) for flight in self)

    @property
    def leaving_of(self) -> "Counter[str]":
        """Device blocks that they will free, by tenant; a copy."""
        return Counter(self._leaving_of)

    def num_leaving_of(self, tenant: str) -> int:
        """Return the device blocks of `tenant` that they will free."""
        return self._leaving_of[tenant]

    def begin(self, seq: Sequence, blocks: list[int], *, is_out: bool, num_leaving: int) -> Flight:
        """Begin to move device blocks of `seq` to or from its host blocks."""
        self._fences += 1
        seq.fence = self._fences
        copy = SwapCopy(seq.fence, seq.request_id, tuple(blocks), tuple(seq.host_table))
        flight = Flight(copy=copy, seq=seq, is_out=is_out, num_leaving=num_leaving)
        flight.began_at = self.now
        self._open[seq.fence] = flight
        flight.num_queued = self.num_blocks
        self._leave(flight, 1)
        return flight

    def end(self, fence: int, now: float) -> Flight | None:
        """Take a swap off the books whose fence has passed; None when it isn't known."""
        flight = self._open.pop(fence, None)
        if flight is not None:
            self._learn(flight, now)
            flight.seq.fence = 0
            self._leave(flight, -1)
        return flight

    def note_ended(self, fence: int, num_leaving: int) -> None:
        """Note that the request of a swap has ended: so many blocks will be free with the swap."""
        flight = self._open[fence]
        if not flight.is_out:
            self._leave(flight, -1)
            flight.num_leaving = num_leaving
            self._leave(flight, 1)

    def only_holds(self, block: int, references: int) -> bool:
        """Tell whether a block with so many references is held by swap-outs alone."""
        return block in self._flown and self._flown[block] == references

    def check_invariants(self) -> None:
        """Verify the sums.

        Raises:
            AssertionError: They are wrong.
        """
        leaving = sum(flight.num_leaving for flight in self)
        if leaving != self.num_leaving or leaving != sum(self._leaving_of.values()):
            raise AssertionError(f"{leaving} blocks leave, booked {self.num_leaving}")
        flown = Counter(b for flight in self if flight.is_out for b in flight.copy.device_blocks)
        if flown != self._flown:
            raise AssertionError(f"{flown} are on their way out, booked {self._flown}")
        for flight in self:
            if flight.seq.fence != flight.copy.fence:
                raise AssertionError(f"{flight.copy} is unknown to its request")

    def _learn(self, flight: Flight, now: float) -> None:
        """Draw the time of a block half way to what a swap has shown.

        It has ended during the last step: it took no longer than until now and, unless it began
        with that step, no less than until that was planned.
        """
        if not flight.num_queued:
            return
        most = max(0.0, now - flight.began_at) / flight.num_queued
        least = max(0.0, self.now - flight.began_at) / flight.num_queued
        nearest = min(max(self.seconds_per_block, least), most)
        self.seconds_per_block += (nearest - self.seconds_per_block) / 2

    def _leave(self, flight: Flight, sign: int) -> None:
        self.num_leaving += sign * flight.num_leaving
        self._leaving_of[flight.seq.tenant.name] += sign * flight.num_leaving
        for block in flight.copy.device_blocks if flight.is_out else ():
            self._flown[block] += sign
            if not self._flown[block]:
                del self._flown[block]
