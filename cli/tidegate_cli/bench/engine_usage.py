"""What an engine uses while it is measured: CPU by thread, memory, steps; and what others use."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tidegate_cli.engine_metrics import EngineMetrics

_TICK_SECONDS = 1.0 / os.sysconf("SC_CLK_TCK")
_QUEUE = "tidegate_queue_seconds_bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """CPU time so far, in seconds.

    Attributes:
        process: Of an engine, the threads that have ended included.
        threads: Of it, by thread id.
        bench: Of this process, the clients.
        machine: Of everything that runs here, and what was stolen from this machine.
    """

    pid: int
    process: float
    threads: Mapping[int, float]
    bench: float
    machine: float

    @classmethod
    def read(cls, pid: int) -> "CpuTimes":
        """Read them now."""
        own = psutil.Process().cpu_times()
        whole = psutil.cpu_times()
        idle = whole.idle + getattr(whole, "iowait", 0.0)
        guest = getattr(whole, "guest", 0.0) + getattr(whole, "guest_nice", 0.0)
        return cls(
            pid=pid,
            process=_seconds_of(Path(f"/proc/{pid}")),
            threads={
                int(folder.name): _seconds_of(folder)
                for folder in Path(f"/proc/{pid}/task").iterdir()
            },
            bench=own.user + own.system,
            # Guests' time is counted as user time already.
            machine=sum(whole) - idle - guest,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU time between two moments, in seconds.

    Attributes:
        engine: Of the engine process.
        http: Of its event loop and all its threads that don't compute steps.
        bench: Of the clients.
        foreign: Of everybody else.
        cpus: Taken by everybody else, on average; libgomp's barrier spins, so steps of several
            threads lose far more by it than the share of time.
    """

    engine: float
    http: float
    bench: float
    foreign: float
    foreign_cpus: float

    @property
    def http_fraction(self) -> float:
        """Of the engine's CPU time."""
        return self.http / self.engine if self.engine else 0.0

    @classmethod
    def between(
        cls, first: CpuTimes, last: CpuTimes, *, seconds: float, num_compute_threads: int
    ) -> "CpuUse":
        """Take the difference.

        The event loop is the main thread. Those that compute, the engine's own and the ones that
        PyTorch adds to it, are the busiest of the others; what remains works for HTTP.
        """
        others = sorted(
            total - first.threads.get(thread, 0.0)
            for thread, total in last.threads.items()
            if thread != last.pid
        )
        engine = last.process - first.process
        bench = last.bench - first.bench
        foreign = max(0.0, last.machine - first.machine - engine - bench)
        return cls(
            engine=engine,
            http=max(0.0, engine - sum(others[-num_compute_threads:])),
            bench=bench,
            foreign=foreign,
            foreign_cpus=foreign / seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUse:
    """An engine's steps between two scrapes.

    Attributes:
        step_seconds: Of executing them, summed.
        scheduler_seconds: Of planning and committing them, summed.
        queue_p99: Time from arrival to admission, interpolated in its histogram's bucket.
        cached_tokens: Prompt tokens that were found in the prefix cache.
    """

    steps: int
    step_seconds: float
    scheduler_seconds: float
    batch_size_mean: float
    queue_p99: float
    cached_tokens: int

    @classmethod
    def between(cls, first: EngineMetrics, last: EngineMetrics) -> "StepUse":
        """Take the difference."""

        def grown(name: str, **labels: str) -> float:
            return last.value(name, **labels) - first.value(name, **labels)

        steps = grown("tidegate_step_batch_size_count")
        rows = grown("tidegate_step_batch_size_sum")
        limits = sorted(last.label_values(_QUEUE, "le"), key=float)
        buckets = [(float(limit), grown(_QUEUE, le=limit)) for limit in limits]
        return cls(
            steps=round(steps),
            step_seconds=grown("tidegate_step_seconds_sum"),
            scheduler_seconds=grown("tidegate_scheduler_seconds_sum"),
            batch_size_mean=rows / steps if steps else 0.0,
            queue_p99=histogram_quantile(buckets, 0.99),
            cached_tokens=round(grown("tidegate_tokens_total", kind="cached")),
        )

    @property
    def scheduler_fraction(self) -> float:
        """Of the time of executing steps."""
        return self.scheduler_seconds / self.step_seconds if self.step_seconds else 0.0


def histogram_quantile(buckets: list[tuple[float, float]], quantile: float) -> float:
    """Return a quantile of a cumulative histogram, as Prometheus' function of that name does.

    Args:
        buckets: Upper limit and how many values don't exceed it, in order; the last is infinite.
        quantile: In (0, 1).

    Returns:
        0 without values; the largest finite limit when the value lies above it.
    """
    total = buckets[-1][1] if buckets else 0.0
    rank = quantile * total
    below, count_below = 0.0, 0.0
    for limit, count in buckets:
        if count >= rank and count > count_below:
            if limit == float("inf"):
                return below
            return below + (limit - below) * (rank - count_below) / (count - count_below)
        below, count_below = limit, count
    return 0.0


def peak_resident_mb(pid: int) -> float:
    """Return the most memory that a process has had resident, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def _seconds_of(folder: Path) -> float:
    try:
        stat = (folder / "stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has ended since it was listed
    # The name, in parentheses, may hold anything: fields are counted from behind it.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_SECONDS
