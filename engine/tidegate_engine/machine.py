"""What of the machine this process may use: cores and memory, as the kernel and its cgroup say."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A share of a machine.

    Attributes:
        cores: Whole ones, at least 1. A quota of 1.5 counts as 1: a second thread would be stopped
            for half of the time while the first waits for it.
        memory_bytes: That the process can ever have.
        available_bytes: That it can have now without anybody's memory being swapped or reclaimed.
    """

    cores: int
    memory_bytes: int
    available_bytes: int

    @classmethod
    def of_this_process(cls, root: Path = _ROOT) -> "Machine":
        """Read the affinity, and under `root` /proc and the control groups, version 1 or 2."""
        cores = float(len(os.sched_getaffinity(0)))
        memory = _meminfo(root)
        total, available = memory["MemTotal"], memory["MemAvailable"]
        for folder in _cgroups(root, "cpu"):
            cores = min(cores, _cpu_quota(folder))
        for folder in _cgroups(root, "memory"):
            limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
            if limit is not None and limit < memory["MemTotal"]:
                total = min(total, limit)
                available = min(available, max(0, limit - _used_bytes(folder)))
        return cls(cores=max(1, int(cores)), memory_bytes=total, available_bytes=available)


def _meminfo(root: Path) -> dict[str, int]:
    lines = (root / "proc/meminfo").read_text().splitlines()
    return {
        name: int(rest.split()[0]) << 10 for name, _, rest in (li.partition(":") for li in lines)
    }


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process' group and of those around it: each one's limits hold."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / _CGROUPS / (controller if controllers else "")
        folder = top / path.lstrip("/")
        # In a container the path may be the host's, which isn't mounted: the top is its own group.
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def _cpu_quota(folder: Path) -> float:
    """Return how many cores a group may use at a time."""
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us").strip()
        period = _text(folder / "cpu.cfs_period_us").strip()
    has_limit = quota.isdecimal() and period.isdecimal() and int(period) > 0
    return int(quota) / int(period) if has_limit else float("inf")


def _used_bytes(folder: Path) -> int:
    """Return the memory of a group, less what of it are files that the kernel may drop."""
    used = _number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"}:
            used -= int(value)
            break
    return max(0, used)


def _number(*paths: Path) -> int | None:
    texts = (_text(path).strip() for path in paths)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _text(path: Path) -> str:
    """Return a file's text; nothing where there is none, as groups differ in their files."""
    try:
        return path.read_text()
    except OSError:
        return ""
