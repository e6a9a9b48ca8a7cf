"""Prometheus' text format, written fast.

The library's own writer checks every name and label of every sample: with a thousand tenants most
of a second, in which the engine's thread gets the interpreter only now and then. Here names are the
engine's own, and label values, of which there are few, are escaped once.

Source: Prometheus documentation, "Exposition formats", text-based format version 0.0.4.
"""

from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_SUFFIXES = {"counter": "_total"}
# When a series began belongs to OpenMetrics alone.
_NOT_SHOWN = "_created"


def text_of(collector: Collector) -> bytes:
    """Write all series of gauges, counters and histograms without timestamps."""
    escaped: dict[str, str] = {}
    lines: list[str] = []
    for family in collector.collect():
        name = family.name + _SUFFIXES.get(family.type, "")
        text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
        lines.append(f"# HELP {name} {text}\n# TYPE {name} {family.type}\n")
        created = family.name + _NOT_SHOWN
        for sample in family.samples:
            if sample.name == created:
                continue
            parts = []
            for label, value in sorted(sample.labels.items()):
                if value not in escaped:
                    escaped[value] = _escape(value)
                parts.append(f'{label}="{escaped[value]}"')
            labels = f"{{{','.join(parts)}}}" if parts else ""
            number = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines.append(f"{sample.name}{labels} {number}\n")
    return "".join(lines).encode()


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
