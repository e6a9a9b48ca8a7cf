"""Clocks that simulated work lets run on."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic time, in seconds, on which somebody can let time pass."""

    def now(self) -> float:
        """Return the time; only differences matter."""
        ...

    def advance(self, seconds: float) -> None:
        """Let so much time pass; return when it has."""
        ...


class VirtualClock:
    """A time that passes only when it is told to: an hour of it takes no time at all."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        """Return the time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by so many seconds; never back."""
        self._now += max(0.0, seconds)

    def advance_to(self, instant: float) -> None:
        """Move on to an instant; one that has passed changes nothing."""
        self._now = max(self._now, instant)


class WallClock:
    """The machine's monotonic time; time passes by sleeping."""

    def now(self) -> float:
        """Return the time."""
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Sleep."""
        if seconds > 0:
            time.sleep(seconds)
