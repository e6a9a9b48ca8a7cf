"""A real process in a place of its own, that failures are done to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tidegate_devcluster.network import PodPlace
from tidegate_devcluster.processes import Child, Lifeline
from tidegate_devcluster.tcp import forwarded

NOBODYS_LINK = "02:00:00:00:00:01"
CLOCK_FOLDER = Path(__file__).resolve().parents[1] / "jumping_clock"
END_SECONDS = 30.0


class Member:
    """An operator or an engine: started, killed, stopped, cut off, its clock put forward or back.

    Attributes:
        name: Of the pod.
        place: Where it runs.
        environment: Added to this process's own when it is started.
        starts: How often it was started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        place: PodPlace,
        host_address: str,
        folder: Path,
        lifeline: Lifeline,
    ) -> None:
        """Starts nothing yet.

        Args:
            name: Of the pod.
            command: What runs.
            place: Where it runs.
            host_address: By which it reaches this machine.
            folder: Of its log and its clock.
            lifeline: Ends it when this process is killed.
        """
        self.name = name
        self.starts = 0
        self.place = place
        self._host_address = host_address
        self._command = [*place.prefix, *command]
        self._clock = folder / f"{name}.clock"
        self._log = folder / f"{name}.log"
        self._lifeline = lifeline
        self.environment = {
            "PYTHONPATH": str(CLOCK_FOLDER),
            "JUMPING_CLOCK_FILE": str(self._clock),
        }

    @property
    def log(self) -> str:
        """What it has printed since its first start."""
        return self._log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.starts > 0 and self._child.is_running()

    def start(self) -> None:
        """Start it anew, as its kubelet does when it has ended."""
        if not self.starts:
            self.set_clock(0.0)
        self._child = Child(
            self.name,
            self._command,
            log=self._log,
            lifeline=self._lifeline,
            environment=self.environment,
        )
        self.starts += 1

    def kill(self) -> None:
        """End it without warning."""
        self._child.stop()

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        # Somebody may start it anew as soon as it has ended.
        child = self._child
        child.terminate()
        code = child.wait(END_SECONDS)
        child.stop()
        return code

    def pause(self) -> None:
        """Stop it as a debugger or a frozen machine does: connections stay, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def set_clock(self, ahead_seconds: float) -> None:
        """Let its wall clock differ from this machine's."""
        # In place of the old one at once: it is read at any time.
        new = self._clock.with_suffix(".new")
        new.write_text(str(ahead_seconds))
        new.replace(self._clock)

    @property
    def can_be_cut_off(self) -> bool:
        """Whether it has a network of its own."""
        return bool(self.place.prefix)

    def cut_off(self) -> None:
        """Drop every packet from and to it; neither side is told.

        Packets go to a link address that nobody has. Connections that exist stay open, and new
        ones wait for an answer.
        """
        nobody = ("lladdr", NOBODYS_LINK, "nud", "permanent")
        self._at_its_end("neigh", "replace", self._host_address, "dev", "eth0", *nobody)
        _ip("neigh", "replace", self.place.ip, "dev", self._bridge, *nobody)

    def reconnect(self) -> None:
        """Let packets through again."""
        self._at_its_end("neigh", "del", self._host_address, "dev", "eth0")
        _ip("neigh", "del", self.place.ip, "dev", self._bridge)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)

    @property
    def _network(self) -> str:
        return self.place.prefix[-1]

    @property
    def _bridge(self) -> str:
        return f"{self._network[:-2]}br"

    def _at_its_end(self, *arguments: str) -> None:
        _ip("-n", self._network, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def forwarding(source: tuple[str, int], target: tuple[str, int]) -> Iterator[None]:
    """Serve an address by connections to another one, in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="forwarding")
    thread.start()
    context = forwarded(source, target)
    asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
    try:
        yield
    finally:
        leaving = context.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(leaving, loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
