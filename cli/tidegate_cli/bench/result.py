"""The one shape in which every benchmark writes what it measured."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

_VERSIONED = ("tidegate", "torch", "kopf", "kubernetes", "redis", "aiohttp")


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What one run of a benchmark measured.

    Attributes:
        bench: Name of the benchmark.
        settings: What it ran with, its seed included.
        results: The numbers, by the keys that the documentation names.
        series: Everything measured one by one, in the order of measuring.
    """

    bench: str
    settings: Mapping[str, object]
    results: Mapping[str, float]
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write the text of the JSON file, this machine's description included."""
        document = {
            "bench": self.bench,
            "machine": describe_machine(),
            "settings": dict(self.settings),
            "results": dict(self.results),
            "series": {name: list(values) for name, values in self.series.items()},
        }
        return json.dumps(document, indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON file."""
        path.write_text(self.to_json(), encoding="utf-8")


def describe_machine() -> dict[str, object]:
    """Return what a number depends on: processor, memory, load by others, versions."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_average_1min": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": _versions(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions() -> dict[str, str]:
    installed = {}
    for name in _VERSIONED:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed
