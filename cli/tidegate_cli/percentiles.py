"""Percentiles by nearest rank: always a value that was measured, never one between two."""

import math
from collections.abc import Iterable


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return the smallest value that at least `percent` of the values don't exceed.

    Args:
        values: In any order.
        percent: In (0, 100].

    Returns:
        None when there is no value.

    Raises:
        ValueError: `percent` is out of range.
    """
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be in (0, 100], got {percent:g}")
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]
