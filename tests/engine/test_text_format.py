import math
import re
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from tidegate_engine.text_format import Family, Histogram

BOUNDS = (0.005, 1, 10)


def as_the_library_writes(registry: CollectorRegistry) -> str:
    """Write it by the library, without the series that say when others began."""
    text = generate_latest(registry).decode()
    return re.sub(r"^(# (HELP|TYPE) )?[\w:]+_created[ {].*\n", "", text, flags=re.MULTILINE)


def a_number(value: float) -> str:
    family = Family("tidegate_number", "gauge", "A number")
    family.add(("main",), value)
    return family.text()


@pytest.mark.parametrize(
    "value", [-2.5, 0.1, 1e-7, 123456789.0, 1.5e22, math.inf, -math.inf, math.nan]
)
def test_numbers_are_written_as_the_library_writes_them(value: float) -> None:
    registry = CollectorRegistry()
    Gauge("tidegate_number", "A number", ("pool",), registry=registry).labels("main").set(value)
    assert a_number(value) == as_the_library_writes(registry)


def test_whole_numbers_are_written_without_a_fraction() -> None:
    assert a_number(2**60).splitlines()[-1] == 'tidegate_number{pool="main"} 1152921504606846976'


@pytest.mark.parametrize(
    "label", ["plain", 'a "quoted" one', "back\\slash", "two\nlines", "Größe", "50%s", ""]
)
def test_label_values_are_written_as_the_library_writes_them(label: str) -> None:
    registry = CollectorRegistry()
    text = "By \\ and\nlines"
    library = Gauge("tidegate_labels", text, ("alpha", "zeta"), registry=registry)
    own = Family("tidegate_labels", "gauge", text, ("alpha", "zeta"))
    for values in ((label, "same"), ("same", label)):
        library.labels(*values).set(1.5)
        own.add(values, 1.5)
    assert own.text() == as_the_library_writes(registry)


def test_counters_are_written_as_the_library_writes_them() -> None:
    registry = CollectorRegistry()
    library = Counter("tidegate_events", "Events", ("kind", "pool"), registry=registry)
    library.labels("one", "serving/main").inc(3.5)
    own = Family("tidegate_events_total", "counter", "Events", ("kind", "pool"))
    own.add(("one", "serving/main"), 3.5)
    assert own.text() == as_the_library_writes(registry)


@pytest.mark.parametrize(
    "observed", [(), (0.001, 0.5, 99.0), (0.005, 1.0, 10.0), (10.5, 0.0)], ids=str
)
def test_a_histogram_has_the_samples_of_the_library(observed: Sequence[float]) -> None:
    registry = CollectorRegistry()
    library = LibraryHistogram(
        "vllm:seconds", "Time", ("pool",), buckets=BOUNDS, registry=registry
    ).labels("serving/main")
    own = Histogram(BOUNDS)
    for seconds in observed:
        library.observe(seconds)
        own.observe(seconds)
    family = Family("vllm:seconds", "histogram", "Time")
    family.add_histogram(("serving/main",), own)
    assert samples(family.text()) == samples(as_the_library_writes(registry))


def samples(text: str) -> list[tuple[str, list[str], float]]:
    """Read lines whose labels may come in any order."""
    found = []
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, number = re.split(r"[{}]", line)
            found.append((name, sorted(labels.split(",")), float(number)))
    return found
