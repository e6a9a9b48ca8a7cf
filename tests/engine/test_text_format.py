import math
import re

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tidegate_engine.text_format import text_of


def as_the_library_writes(registry: CollectorRegistry) -> bytes:
    """Write it by the library, without the series that say when others began."""
    text = generate_latest(registry).decode()
    return re.sub(
        r"^(# (HELP|TYPE) )?[\w:]+_created[ {].*\n", "", text, flags=re.MULTILINE
    ).encode()


@pytest.mark.parametrize(
    "value", [0, 1, -2.5, 0.1, 1e-7, 123456789.0, 1.5e22, math.inf, -math.inf, math.nan]
)
def test_numbers_are_written_as_the_library_writes_them(value: float) -> None:
    registry = CollectorRegistry()
    Gauge("tidegate_number", "A number", registry=registry).set(value)
    assert text_of(registry) == as_the_library_writes(registry)


@pytest.mark.parametrize(
    "label", ["plain", 'a "quoted" one', "back\\slash", "two\nlines", "Größe", ""]
)
def test_label_values_are_written_as_the_library_writes_them(label: str) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("tidegate_labels", "By \\ and\nlines", ("zeta", "alpha"), registry=registry)
    gauge.labels(label, "same").set(1)
    gauge.labels("same", label).set(2)
    assert text_of(registry) == as_the_library_writes(registry)


def test_counters_and_histograms_are_written_as_the_library_writes_them() -> None:
    registry = CollectorRegistry()
    counter = Counter("tidegate_events", "Events", ("pool", "kind"), registry=registry)
    counter.labels("serving/main", "one").inc(3)
    Counter("tidegate_silent", "Never seen", ("pool",), registry=registry)
    histogram = Histogram(
        "vllm:seconds", "Time", ("pool",), buckets=(0.005, 1, 10), registry=registry
    )
    for seconds in (0.001, 0.5, 99):
        histogram.labels("serving/main").observe(seconds)
    assert text_of(registry) == as_the_library_writes(registry)
