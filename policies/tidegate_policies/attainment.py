"""How latencies are counted against service levels, and what the counts of several engines say.

All engines sort latencies into the same buckets, so that adding up counts loses nothing: a
percentile of a fleet is that of its requests, never a mean of the engines' percentiles. Bounds are
24 to a decade, each 10.07 percent above the one before: that is how far a percentile read off the
buckets may lie above the true one.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

from tidegate_policies.wire import Attainment, LatencyCounts

SHORTEST_SECONDS = 1e-4
"""Upper bound of the first bucket."""

_PER_DECADE = 24
_DECADES = 9  # up to 27.8 hours; no target is longer than a day

_BOUNDS = tuple(
    SHORTEST_SECONDS * 10 ** (i / _PER_DECADE) for i in range(_DECADES * _PER_DECADE + 1)
)

NEVER = len(_BOUNDS)
"""The bucket of what did not come at all, or so late that it makes no difference."""


def bucket_of(seconds: float) -> int:
    """Return the index of the bucket of a latency: the first whose upper bound it doesn't pass.

    Args:
        seconds: Infinite for what never came.
    """
    return bisect_left(_BOUNDS, seconds)


def upper_bound(index: int) -> float:
    """Return the longest latency in a bucket, in seconds; infinite for `NEVER`."""
    return _BOUNDS[index] if index < NEVER else math.inf


def quantile(buckets: Iterable[tuple[int, int]], percentile: int) -> float | None:
    """Return a percentile (nearest rank) of counted latencies, in seconds.

    Args:
        buckets: `(index, count)` in any order.
        percentile: In [1, 99].

    Returns:
        The upper bound of the bucket that holds it, hence never less than the true one; infinite
        when that never came; None when nothing was counted.
    """
    ordered = sorted(buckets)
    missing = math.ceil(percentile * sum(count for _, count in ordered) / 100)
    for index, count in ordered:
        missing -= count
        if count and missing <= 0:
            return upper_bound(index)
    return None


def num_counted(counts: LatencyCounts) -> int:
    """Return how many latencies were counted."""
    return sum(count for _, count in counts.buckets)


def is_attained(counts: LatencyCounts, percentile: int) -> bool:
    """Tell whether at least `percentile` percent of the latencies met their target."""
    return 100 * counts.met >= percentile * num_counted(counts)


def measured(counts: LatencyCounts, percentile: int) -> float | None:
    """Return a percentile, in seconds, that is above the target exactly when it is missed.

    Buckets know a percentile by its upper bound alone; whether the target was met is known exactly.
    """
    value = quantile(counts.buckets, percentile)
    if value is not None and is_attained(counts, percentile):
        return min(value, counts.target_seconds)
    return value


def merged(
    parts: Iterable[Attainment], *, ttft_seconds: float | None, itl_seconds: float | None
) -> Attainment | None:
    """Add up what several engines counted of one tenant.

    Args:
        parts: One of each engine, in any order.
        ttft_seconds: The target now; None = there is none. What an engine has counted against
            another one, as it doesn't obey the newest policy yet, is left out.
        itl_seconds: Likewise.

    Returns:
        None when there was no traffic against these targets.
    """
    wanted = (ttft_seconds, itl_seconds)
    counted = [part for part in parts if (_target(part.ttft), _target(part.itl)) == wanted]
    if not counted:
        return None
    return Attainment(
        requests=sum(part.requests for part in counted),
        met=sum(part.met for part in counted),
        ttft=_sum([part.ttft for part in counted if part.ttft is not None]),
        itl=_sum([part.itl for part in counted if part.itl is not None]),
    )


def _target(counts: LatencyCounts | None) -> float | None:
    return None if counts is None else counts.target_seconds


def _sum(parts: list[LatencyCounts]) -> LatencyCounts | None:
    if not parts:
        return None
    buckets: Counter[int] = Counter()
    for part in parts:
        for index, count in part.buckets:
            buckets[index] += count
    return LatencyCounts(
        target_seconds=parts[0].target_seconds,
        met=sum(part.met for part in parts),
        buckets=tuple(sorted(buckets.items())),
    )
