from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tidegate_devcluster.errors import ToolBuildError
from tidegate_devcluster.tool_cache import ToolCache


def cache_in(root: Path) -> tuple[ToolCache, list[str]]:
    lines: list[str] = []
    return ToolCache(root, lines.append), lines


def refuse(_: Path) -> None:
    raise AssertionError("filled again")


def write(folder: Path) -> None:
    (folder / "tool").write_text("complete")


def test_a_folder_is_filled_once(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)

    folder = cache.folder("tool-1", write)

    assert cache.folder("tool-1", refuse) == folder
    assert (folder / "tool").read_text() == "complete"


def test_a_failed_fill_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    cache, _ = cache_in(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "tool").write_text("half")
        raise RuntimeError("out of disk")

    with pytest.raises(RuntimeError):
        cache.folder("tool-1", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tool-1.lock"]

    assert (cache.folder("tool-1", write) / "tool").read_text() == "complete"


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tidegate_devcluster.tool_cache import ToolCache\n"
        "def fill(folder):\n"
        "    (folder / 'tool').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "ToolCache(Path(sys.argv[1]), print).folder('tool-1', fill)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert [path.read_text() for path in tmp_path.glob("tool-1.part.*/tool")] == ["half"]

    cache, _ = cache_in(tmp_path)

    assert (cache.folder("tool-1", write) / "tool").read_text() == "complete"
    assert not list(tmp_path.glob("tool-1.part.*"))


def test_who_comes_while_another_fills_waits_and_finds_it(tmp_path: Path) -> None:
    first, _ = cache_in(tmp_path)
    is_filling, may_finish = threading.Event(), threading.Event()

    def fill_slowly(folder: Path) -> None:
        is_filling.set()
        assert may_finish.wait(10)
        write(folder)

    filling = threading.Thread(target=first.folder, args=("tool-1", fill_slowly))
    filling.start()
    assert is_filling.wait(10)

    # The line tells that it waits, so it is the moment to let the first one finish.
    second = ToolCache(tmp_path, lambda _: may_finish.set())
    folder = second.folder("tool-1", refuse)

    filling.join()
    assert may_finish.is_set()
    assert (folder / "tool").read_text() == "complete"


def test_who_waits_for_another_may_give_up(tmp_path: Path) -> None:
    first, _ = cache_in(tmp_path)
    second, _ = cache_in(tmp_path)

    def fill_after_the_other_gave_up(folder: Path) -> None:
        second.given_up.set()
        with pytest.raises(ToolBuildError, match="given up"):
            second.folder("tool-1", refuse)
        write(folder)

    assert (first.folder("tool-1", fill_after_the_other_gave_up) / "tool").exists()
