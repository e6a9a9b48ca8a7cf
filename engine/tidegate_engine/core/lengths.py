"""How many output tokens a request will still produce, judged by those that finished before it.

Source: "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025),
sections 3.1 and 3.2: neighbouring windows of finished requests resemble each other, and what a
running request has produced already narrows its distribution. Instead of drawing lengths at random
from it, a quantile is taken, so that the same state always yields the same plan.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import accumulate

BASE_QUANTILE = 0.7
"""The quantile of the output length that is predicted when there is no pressure.

Admission adds up many predictions, so each should be about a mean. Output lengths have a long
tail, whose mean lies above the median: at quantile 0.63 of an exponential distribution and 0.69 of
a log-normal one (sigma 1). The median would promise room that isn't there; at 0.8 of an exponential
distribution, 1.6 times the mean, a third of the pool would stay idle.
"""

PESSIMISTIC_QUANTILE = 0.95
"""What the quantile approaches under repeated preemption."""

_PESSIMISM_GAIN = 0.5  # share of the way up that one preemption takes
_RELAXATION = 0.02  # share of the way back that one finished request takes: half of it in 35

_WINDOW = 1000  # finished requests that are remembered, of a tenant and of the pool
_MIN_SAMPLES = 16  # with fewer, a quantile is hardly more than a guess
_REFRESH_EVERY = 8  # finished requests between two refreshes: predictions hold still meanwhile

_LONGEST_TOKENS = 1 << 20  # longer outputs count as this long


def _bin_edges() -> tuple[int, ...]:
    edges = list(range(1, 65))
    while edges[-1] < _LONGEST_TOKENS:
        edges.append(min(edges[-1] + edges[-1] // 25, _LONGEST_TOKENS))
    return tuple(edges)


_EDGES = _bin_edges()
"""Longest length in each bin: single lengths up to 64 tokens, then 4 % wide."""


class LengthEstimator:
    """Predicts output lengths per tenant from a sliding window of finished requests.

    A tenant with fewer than 16 of them is predicted as the pool is, and a pool with fewer than 16
    by the most a request may produce.

    Attributes:
        version: Grows whenever predictions may have changed: with every 8th finished request and a
            tenant's 16th, with each preemption, and when a tenant is forgotten.
    """

    def __init__(self) -> None:
        self.version = 0
        self._quantile = BASE_QUANTILE
        self._predicted_quantile = BASE_QUANTILE
        self._pool = _Window()
        self._tenants: dict[str, _Window] = {}
        self._changed: dict[str, None] = {}  # tenants since the last refresh, in order
        self._since_refresh = 0

    def observe(self, tenant: str, output_tokens: int) -> None:
        """Learn from a request that finished; one that was cancelled says nothing of its length."""
        length_bin = bisect_left(_EDGES, min(output_tokens, _LONGEST_TOKENS))
        window = self._tenants.setdefault(tenant, _Window())
        window.add(length_bin)
        self._pool.add(length_bin)
        self._quantile -= (self._quantile - BASE_QUANTILE) * _RELAXATION
        self._changed[tenant] = None
        self._since_refresh += 1
        if self._since_refresh == _REFRESH_EVERY or len(window.bins) == _MIN_SAMPLES:
            self._refresh()

    def predict(self, tenant: str, generated: int, at_most: int) -> int:
        """Return how many output tokens are still to come, from 1 to `at_most - generated`.

        It is the quantile among those finished requests that were longer than `generated`. Where
        none of the tenant's was, the pool's are asked; where none of the pool's was either, nothing
        is known but the limit, and the limit is returned: too much holds admission back for a
        while, too little preempts.

        Args:
            tenant: Whose request it is.
            generated: Output tokens that it has already.
            at_most: Most output tokens of the request; when they are out, 0 are to come.
        """
        most = at_most - generated
        if most <= 1:
            return max(most, 0)
        window = self._tenants.get(tenant)
        shorter = bisect_right(_EDGES, generated)
        for table in (window.table if window else None, self._pool.table):
            if table is not None and table[-1] > (below := table[shorter]):
                rank = below + (table[-1] - below) * self._predicted_quantile
                to_come = _EDGES[bisect_left(table, rank, shorter) - 1] - generated
                return min(to_come, most)
        return most

    def note_preemption(self) -> None:
        """Predict longer outputs, from now on: admission had counted on room that was needed.

        The quantile goes half of its way to 0.95, and back by 2 % with each finished request.
        """
        self._quantile += (PESSIMISTIC_QUANTILE - self._quantile) * _PESSIMISM_GAIN
        self._predicted_quantile = self._quantile
        self.version += 1

    def forget(self, tenant: str) -> None:
        """Drop what is known of one tenant; the pool's window keeps its share."""
        if self._tenants.pop(tenant, None) is not None:
            self._changed.pop(tenant, None)
            self.version += 1

    def check_invariants(self) -> None:
        """Verify that windows, histograms and tables agree.

        Raises:
            AssertionError: A histogram doesn't count its window, a table isn't cumulative, or the
                quantile is out of its range.
        """
        if not BASE_QUANTILE <= self._quantile <= PESSIMISTIC_QUANTILE:
            raise AssertionError(f"quantile {self._quantile} is out of range")
        for name, window in (("the pool", self._pool), *self._tenants.items()):
            window.check_invariants(name)

    def _refresh(self) -> None:
        for tenant in self._changed:
            self._tenants[tenant].tabulate()
        self._pool.tabulate()
        self._predicted_quantile = self._quantile
        self._changed.clear()
        self._since_refresh = 0
        self.version += 1


class _Window:
    """The bins of the last finished requests, and their histogram.

    Attributes:
        bins: Oldest first.
        table: Entry `i` counts the samples in bins before `i`, as of the last refresh; None = too
            few to predict by.
    """

    __slots__ = ("_counts", "bins", "table")

    def __init__(self) -> None:
        self.bins: deque[int] = deque()
        self.table: list[int] | None = None
        self._counts = [0] * len(_EDGES)

    def add(self, length_bin: int) -> None:
        if len(self.bins) == _WINDOW:
            self._counts[self.bins.popleft()] -= 1
        self.bins.append(length_bin)
        self._counts[length_bin] += 1

    def tabulate(self) -> None:
        if len(self.bins) >= _MIN_SAMPLES:
            self.table = list(accumulate(self._counts, initial=0))

    def check_invariants(self, name: str) -> None:
        if sum(self._counts) != len(self.bins) or len(self.bins) > _WINDOW:
            raise AssertionError(f"the histogram of {name} doesn't count its window")
        if any(self._counts[length_bin] < 1 for length_bin in self.bins):
            raise AssertionError(f"the histogram of {name} misses a sample")
        if self.table is not None and self.table != sorted(self.table):
            raise AssertionError(f"the table of {name} isn't cumulative")
