import os
from pathlib import Path

import pytest

from tidegate_engine.machine import Machine

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB, 8 of them available, without groups."""
    write(tmp_path / "proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_groups_the_whole_machine_may_be_used(root: Path) -> None:
    machine = Machine.of_this_process(root)
    assert machine == Machine(cores=CORES, memory_bytes=16 * GIB, available_bytes=8 * GIB)


def test_the_limits_of_a_group_and_of_those_around_it_hold(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/engine\n")
    groups = root / "sys/fs/cgroup/pods"
    write(groups / "engine/cpu.max", "100000 100000\n")
    write(groups / "engine/memory.max", "max\n")
    write(groups / "memory.max", f"{4 * GIB}\n")
    write(groups / "memory.current", f"{3 * GIB}\n")
    write(groups / "memory.stat", f"anon 1\ninactive_file {2 * GIB}\nactive_file 5\n")
    machine = Machine.of_this_process(root)
    # What of the group's memory are files may be dropped for the asking.
    assert machine == Machine(cores=1, memory_bytes=4 * GIB, available_bytes=3 * GIB)


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1), ("20000 100000", 1)])
def test_parts_of_a_core_do_not_count(root: Path, quota: str, cores: int) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/cpu.max", quota)
    assert Machine.of_this_process(root).cores == min(CORES, cores)


def test_a_container_that_sees_its_own_group_at_the_top_is_bound_by_it(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/kubepods/pod1/container2\n")
    write(root / "sys/fs/cgroup/memory.max", str(GIB))
    write(root / "sys/fs/cgroup/memory.current", "0")
    assert Machine.of_this_process(root).memory_bytes == GIB


def test_groups_of_version_1_are_read_as_well(root: Path) -> None:
    write(root / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/x\n3:cpuset:/y\n")
    write(root / "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us", "100000")
    write(root / "sys/fs/cgroup/cpu/x/cpu.cfs_period_us", "100000")
    write(root / "sys/fs/cgroup/memory/x/memory.limit_in_bytes", str(2 * GIB))
    write(root / "sys/fs/cgroup/memory/x/memory.usage_in_bytes", str(GIB))
    machine = Machine.of_this_process(root)
    assert machine == Machine(cores=1, memory_bytes=2 * GIB, available_bytes=GIB)


def test_a_limit_beyond_the_machine_is_none(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    write(root / "sys/fs/cgroup/memory.max", str(1 << 60))
    write(root / "sys/fs/cgroup/cpu.max", "max 100000")
    machine = Machine.of_this_process(root)
    assert (machine.cores, machine.memory_bytes) == (CORES, 16 * GIB)


def test_the_machine_of_this_test_can_be_read() -> None:
    machine = Machine.of_this_process()
    assert 1 <= machine.cores <= CORES
    assert 0 < machine.available_bytes <= machine.memory_bytes
