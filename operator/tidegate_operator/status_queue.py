"""Statuses that wait to be written, in the order in which they will be; pure."""

import heapq
import itertools
from collections.abc import Container
from dataclasses import dataclass

from tidegate_operator.planner import StatusUpdate

_FEW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingStatus:
    """A status that waits.

    Attributes:
        due: The time from which on it may be written.
        is_urgent: Whether its conditions are news.
        order: Grows with the time at which its object began to wait.
        failures: Attempts to write it so far.
    """

    update: StatusUpdate
    due: float
    is_urgent: bool
    order: int
    failures: int = 0

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """Sort key: what will last goes first, then what people wait for, then by age."""
        return (not self.update.is_settled, not self.is_urgent, self.order)


class StatusQueue:
    """Of each object the newest status that waits: by rank, once it is due.

    Nothing here looks at all that waits, which may be a status of each of thousands of objects. So
    the heaps also hold what was replaced or dropped, until it is met or outweighs the rest.
    """

    def __init__(self) -> None:
        self._newest: dict[str, WaitingStatus] = {}
        self._due: list[tuple[tuple[bool, bool, int], int, WaitingStatus]] = []
        self._later: list[tuple[float, int, WaitingStatus]] = []
        # Of two entries neither is ever compared beyond it.
        self._number = itertools.count()

    def __len__(self) -> int:
        return len(self._newest)

    @property
    def num_entries(self) -> int:
        """How many entries are kept for that."""
        return len(self._due) + len(self._later)

    def get(self, uid: str) -> WaitingStatus | None:
        """Return what waits for an object."""
        return self._newest.get(uid)

    def put(self, waiting: WaitingStatus) -> None:
        """Let a status wait, instead of the one that waited for the object before."""
        self._newest[waiting.update.uid] = waiting
        heapq.heappush(self._later, (waiting.due, next(self._number), waiting))
        if self.num_entries > 2 * len(self) + _FEW:
            self._due = []
            self._later = [(one.due, next(self._number), one) for one in self._newest.values()]
            heapq.heapify(self._later)

    def drop(self, uid: str) -> None:
        """Let nothing wait for an object."""
        self._newest.pop(uid, None)

    def take(self, now: float, *, busy: Container[str]) -> WaitingStatus | None:
        """Remove and return the first that is due; None while there is none.

        Args:
            now: Seconds of the clock by which statuses are due.
            busy: Objects that are being written. What waits for them goes on waiting, but has to be
                put in again once they aren't busy.
        """
        while self._later and self._later[0][0] <= now:
            _, number, waiting = heapq.heappop(self._later)
            heapq.heappush(self._due, (waiting.rank, number, waiting))
        while self._due:
            _, _, waiting = heapq.heappop(self._due)
            uid = waiting.update.uid
            if self._newest.get(uid) is waiting and uid not in busy:
                return self._newest.pop(uid)
        return None

    def due_at(self) -> float | None:
        """Return the earliest time at which `take` may find something that it didn't find just now.

        None stands for never, unless something is put in.
        """
        return self._later[0][0] if self._later else None
