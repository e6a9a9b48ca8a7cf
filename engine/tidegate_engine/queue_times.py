"""How long requests waited for their first admission, in the last minute, over all tenants."""

from collections import Counter, deque
from collections.abc import Callable

from tidegate_policies.attainment import bucket_of

SUB_WINDOWS = 6
SUB_WINDOW_SECONDS = 10.0
"""What is older than all sub-windows is forgotten, one sub-window at a time."""


class QueueTimes:
    """Counts times in the queue in the buckets that all engines share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows: deque[tuple[int, Counter[int]]] = deque()

    def note(self, seconds: float) -> None:
        """Count the time from a request's arrival to its first admission."""
        number = self._forget_old()
        if not self._windows or self._windows[-1][0] != number:
            self._windows.append((number, Counter()))
        self._windows[-1][1][bucket_of(seconds)] += 1

    def buckets(self) -> tuple[tuple[int, int], ...]:
        """Return what was counted as `(index, count)` by index, empty ones left out."""
        self._forget_old()
        total: Counter[int] = Counter()
        for _, counts in self._windows:
            total.update(counts)
        return tuple(sorted(total.items()))

    def _forget_old(self) -> int:
        number = int(self._clock() // SUB_WINDOW_SECONDS)
        while self._windows and self._windows[0][0] <= number - SUB_WINDOWS:
            self._windows.popleft()
        return number
