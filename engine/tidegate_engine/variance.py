"""Variance of what was seen lately, in constant memory."""

import math

LEAST_WEIGHT = 8.0
"""With less than so many samples left, a variance says nothing."""


class DecayingVariance:
    """Mean and variance of samples whose weight falls by the factor e in each span of time.

    Source: West, "Updating mean and variance estimates: an improved method", CACM 22 (1979), with
    all weights multiplied by the same factor as time goes by, which moves neither of the two.
    """

    __slots__ = ("_at", "_mean", "_span_seconds", "_squares", "_weight")

    def __init__(self, span_seconds: float) -> None:
        self._span_seconds = span_seconds
        self._at = 0.0
        self._weight = 0.0
        self._mean = 0.0
        self._squares = 0.0

    def observe(self, sample: float, *, at: float) -> None:
        """Take in a sample; `at` never goes back."""
        kept = self._kept(at)
        self._at = max(self._at, at)
        self._squares *= kept
        self._weight = self._weight * kept + 1.0
        distance = sample - self._mean
        self._mean += distance / self._weight
        self._squares += distance * (sample - self._mean)

    def value(self, *, at: float) -> float | None:
        """Return the variance; None while too few samples are recent enough."""
        if self._weight * self._kept(at) < LEAST_WEIGHT:
            return None
        return self._squares / self._weight

    def _kept(self, at: float) -> float:
        return math.exp(min(0.0, (self._at - at) / self._span_seconds))


class TrafficVariance:
    """The variance of the last minutes beside that of the day: a change of one is a drift.

    Attributes:
        windows: By the name that metrics call them.
    """

    __slots__ = ("windows",)

    def __init__(self) -> None:
        self.windows = {
            "5m": DecayingVariance(300.0),
            "1d": DecayingVariance(86_400.0),
        }

    def observe(self, sample: float, *, at: float) -> None:
        """Take in a sample."""
        for window in self.windows.values():
            window.observe(sample, at=at)

    def values(self, *, at: float) -> dict[str, float]:
        """Return the variances that say something, by window."""
        found = {name: window.value(at=at) for name, window in self.windows.items()}
        return {name: value for name, value in found.items() if value is not None}
