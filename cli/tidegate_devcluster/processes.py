"""Child processes: in a group of their own, waited for, stopped whole, never left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tidegate_devcluster import lifeline
from tidegate_devcluster.errors import StartError

POLL_SECONDS = 0.02
TAIL_CHARACTERS = 3000
# Below the range from which Linux takes the ports of outgoing connections: between choosing a
# port and binding it, and across a restart of its server, no connection takes it.
FIRST_PORT, LAST_PORT = 20000, 32700


class Lifeline:
    """A process that outlives this one for as long as it takes to remove what this one leaves.

    Usable from any thread. Leaving the context ends it without removing anything that was
    forgotten before; what is still known is removed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lifeline:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(lifeline.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            # Closes its standard input, which is what it waits for, and waits for it.
            self._process.communicate()

    def watch_group(self, group: int) -> None:
        """The process group is killed if this process dies."""
        self._send("group", group)

    def forget_group(self, group: int) -> None:
        """The group has ended: its number may belong to others from now on."""
        self._send("forget", group)

    def run_at_end(self, command: Sequence[str]) -> None:
        """The command runs when this process has died or the context is left."""
        self._send("command", list(command))

    def remove_at_end(self, tree: Path) -> None:
        """The folder is removed when this process has died or the context is left."""
        self._send("tree", str(tree))

    def keep(self, tree: Path) -> None:
        """The folder is not removed after all."""
        self._send("keep", str(tree))

    def _send(self, kind: str, what: int | str | list[str]) -> None:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the lifeline is not open")
        with self._lock:
            self._process.stdin.write(json.dumps([kind, what]).encode() + b"\n")
            self._process.stdin.flush()


class Child:
    """A running child process, leader of its own session, with its output in a log file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        lifeline: Lifeline,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts it; the environment is added to this process's own."""
        self.name = name
        self.log = log
        self._lifeline = lifeline
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            lifeline.watch_group(self._process.pid)
        except BaseException:
            self._signal(signal.SIGKILL)
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        """Process id, which is the group's id as well."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def raise_if_ended(self) -> None:
        """Complains about an end that nobody asked for.

        Raises:
            StartError: It has ended.
        """
        if not self.is_running():
            raise self._start_error(f"ended with status {self._process.returncode}")

    def wait_until(self, is_ready: Callable[[], bool], *, timeout_seconds: float) -> None:
        """Waits for the condition.

        Raises:
            StartError: The child ended, or the time is over. The child is left as it is.
        """
        deadline = time.monotonic() + timeout_seconds
        while not is_ready():
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise self._start_error(f"is not ready after {timeout_seconds:g} s")
            time.sleep(POLL_SECONDS)

    def terminate(self) -> None:
        """Asks the group to end; `stop` waits for it."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout_seconds: float) -> int:
        """Waits for its end and returns its exit status.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        return self._process.wait(timeout_seconds)

    def stop(self, *, grace_seconds: float = 0.0) -> None:
        """Ends the whole group: SIGTERM and the grace if there is one, then SIGKILL."""
        if grace_seconds > 0 and self.is_running():
            self.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        # Grandchildren may outlive the leader, so the group is killed in any case.
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._lifeline.forget_group(self.pid)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _start_error(self, what: str) -> StartError:
        tail = self.log.read_text(errors="replace")[-TAIL_CHARACTERS:]
        return StartError(self.name, self.log, what, tail)


def free_port(address: str = "127.0.0.1") -> int:
    """Returns a TCP port nobody listens on.

    Chosen at random, so that clusters started at once rarely choose the same.
    """
    for port in random.sample(range(FIRST_PORT, LAST_PORT), 200):
        with socket.socket() as candidate, suppress(OSError):
            candidate.bind((address, port))
            return port
    raise OSError(f"no free port between {FIRST_PORT} and {LAST_PORT} on {address}")
