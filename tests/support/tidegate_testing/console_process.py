"""`tidegate console` as a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate_testing.cluster import eventually

START_SECONDS = 120.0
STOP_SECONDS = 15.0


@dataclass
class ConsoleProcess:
    """A running console.

    Attributes:
        url: Of its page, with a slash at its end and without a token.
        log: What it has printed.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        self.process.terminate()
        return self.process.wait(timeout=STOP_SECONDS)


@contextmanager
def a_console(folder: Path, *arguments: str) -> Iterator[ConsoleProcess]:
    """Run one on a free port for the length of the block."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "console.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_cli", "console", "--port", "0", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def address() -> str:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://[^/\s]+/", log.read_text())
        return found[0] if found else ""

    try:
        started = eventually(address, "the console's address", timeout_seconds=START_SECONDS)
        yield ConsoleProcess(process, started, log)
    finally:
        process.kill()
        process.wait()
