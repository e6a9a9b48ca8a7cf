"""Prometheus' text format, written fast.

The library's own writer makes an object of every sample and checks every name and label of it: with
a thousand tenants most of a second, in which the engine's thread gets the interpreter only now and
then. Here names are the engine's own, and a sample becomes a line at once.

Source: Prometheus documentation, "Exposition formats", text-based format version 0.0.4.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from prometheus_client.utils import floatToGoString

Kind = Literal["counter", "gauge", "histogram"]


class Histogram:
    """How many observations were at most as large as each bound.

    Observed in one thread, and read in any: a reader may see the sum without the last observation.

    Attributes:
        bounds: Ascending; above the last one there is no bound.
        counts: Observations between two bounds, and above the last.
        sum: Of everything observed.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, number: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, number)] += 1
        self.sum += number


class Family:
    """All series of one name."""

    def __init__(self, name: str, kind: Kind, text: str, labels: Sequence[str] = ("pool",)) -> None:
        """Begin without a series.

        Args:
            name: As Prometheus stores it: that of a counter ends in `_total`.
            kind: Of the metric.
            text: What it says.
            labels: Of each series.
        """
        self._name = name
        said = text.replace("\\", r"\\").replace("\n", r"\n")
        self._lines = [f"# HELP {name} {said}\n# TYPE {name} {kind}\n"]
        # Filled in by the % operator.
        self._labels = ",".join(f'{label}="%s"' for label in labels)
        self._line = f"{name}{{{self._labels}}} %s\n"
        self._bounds: list[str] = []

    def add(self, values: Sequence[str], number: float) -> None:
        """Add a series by the values of its labels."""
        self._lines.append(self._line % (*map(_escaped, values), _number(number)))

    def add_histogram(self, values: Sequence[str], histogram: Histogram) -> None:
        """Add the series of a histogram, by the values of its labels without `le`.

        All histograms of a family have the same bounds.
        """
        name = self._name
        labels = self._labels % (*map(_escaped, values),)
        totals = [*accumulate(tuple(histogram.counts))]
        if not self._bounds:
            self._bounds = [*map(_number, map(float, histogram.bounds)), "+Inf"]
        self._lines += [
            f'{name}_bucket{{{labels},le="{bound}"}} {count}\n'
            for bound, count in zip(self._bounds, totals, strict=True)
        ]
        self._lines.append(f"{name}_count{{{labels}}} {totals[-1]}\n")
        self._lines.append(f"{name}_sum{{{labels}}} {_number(histogram.sum)}\n")

    def text(self) -> str:
        """Return what Prometheus reads."""
        return "".join(self._lines)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(number: float) -> str:
    if isinstance(number, int):
        return str(number)
    return str(floatToGoString(number))  # type: ignore[no-untyped-call]
