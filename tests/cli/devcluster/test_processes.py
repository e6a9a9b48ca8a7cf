from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tidegate_devcluster.errors import StartError
from tidegate_devcluster.processes import Child, Lifeline, free_port
from tidegate_testing.cluster import eventually

# A parent with a child of its own in the same group; both would run for an hour.
FAMILY = (
    "import subprocess, sys, time\n"
    "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
    "print(sleeper.pid, flush=True)\n"
    "time.sleep(3600)\n"
)


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    with Lifeline() as opened:
        yield opened


def family(tmp_path: Path, lifeline: Lifeline) -> tuple[Child, int]:
    log = tmp_path / "family.log"
    child = Child("family", [sys.executable, "-c", FAMILY], log=log, lifeline=lifeline)
    child.wait_until(lambda: log.read_text().endswith("\n"), timeout_seconds=10)
    return child, int(log.read_text())


def is_running(pid: int) -> bool:
    # A killed child of nobody may stay a zombie for a moment.
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stopping_ends_grandchildren_as_well(tmp_path: Path, lifeline: Lifeline) -> None:
    child, grandchild = family(tmp_path, lifeline)
    assert is_running(grandchild)

    child.stop(grace_seconds=5)

    assert not child.is_running()
    eventually(lambda: not is_running(grandchild), "the grandchild's end")


def test_a_child_that_ends_early_is_reported_with_the_end_of_its_log(
    tmp_path: Path, lifeline: Lifeline
) -> None:
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(7)"]
    child = Child("broken", command, log=tmp_path / "broken.log", lifeline=lifeline)

    with pytest.raises(StartError, match=r"(?s)broken ended with status 7.*no such flag") as failed:
        child.wait_until(lambda: False, timeout_seconds=30)

    assert failed.value.log == tmp_path / "broken.log"
    child.stop()


def test_a_child_that_stays_unready_is_reported_and_left_running(
    tmp_path: Path, lifeline: Lifeline
) -> None:
    child, _ = family(tmp_path, lifeline)

    with pytest.raises(StartError, match=r"family is not ready after 0\.1 s"):
        child.wait_until(lambda: False, timeout_seconds=0.1)

    assert child.is_running()
    child.stop()


def test_leaving_the_lifeline_ends_what_was_not_stopped(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with Lifeline() as lifeline:
        child, grandchild = family(tmp_path, lifeline)
        lifeline.remove_at_end(tree)
        lifeline.run_at_end(["touch", str(tmp_path / "ran")])

    assert not child.is_running()
    eventually(lambda: not is_running(grandchild), "the grandchild's end")
    assert (tmp_path / "ran").exists()
    assert not tree.exists()


def test_a_folder_that_is_to_be_kept_outlives_the_lifeline(tmp_path: Path) -> None:
    with Lifeline() as lifeline:
        lifeline.remove_at_end(tmp_path)
        lifeline.keep(tmp_path)

    assert tmp_path.exists()


def test_children_and_grandchildren_die_when_their_owner_is_killed(tmp_path: Path) -> None:
    owner_program = (
        "import sys, time; from pathlib import Path\n"
        "from tidegate_devcluster.processes import Child, Lifeline\n"
        "with Lifeline() as lifeline:\n"
        "    child = Child('family', sys.argv[2:], log=Path(sys.argv[1]), lifeline=lifeline)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(3600)\n"
    )
    log = tmp_path / "family.log"
    with subprocess.Popen(
        [sys.executable, "-c", owner_program, str(log), sys.executable, "-c", FAMILY],
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        grandchild = int(eventually(log.read_text, "the grandchild"))
        lifelines = [other.pid for other in psutil.Process(owner.pid).children()]

        os.kill(owner.pid, signal.SIGKILL)

    for pid in (child, grandchild, *lifelines):
        eventually(lambda pid=pid: not is_running(pid), f"the end of {pid}")  # type: ignore[misc]


def test_a_free_port_has_no_listener() -> None:
    port = free_port()

    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
