"""Figures that several benchmarks take from what they measured."""

from collections.abc import Iterable

from tidegate_cli.percentiles import percentile

QUANTILES = (50, 90, 99)


def quantiles(values: Iterable[float]) -> list[float]:
    """Return p50, p90 and p99; nothing when there is no value."""
    ordered = sorted(values)
    found = (percentile(ordered, percent) for percent in QUANTILES)
    return [value for value in found if value is not None]
