"""Runs beside a development cluster and removes what it leaves when its process is killed.

A program of its own, standard library alone, started with the owner's end of a pipe as standard
input. Each line is a JSON list: ["group", PGID], ["forget", PGID], ["tree", PATH], ["keep", PATH]
or ["command", ARGV]. When the pipe closes or the owner is gone, it kills the process groups still
known, runs the commands and removes the trees, then ends. PR_SET_PDEATHSIG would be shorter, but
is tied to the thread that started the child, spares grandchildren and cleans up no network.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

OWNER_CHECK_SECONDS = 1.0


class Leftovers:
    """What there is to remove, in the order in which it came."""

    def __init__(self) -> None:
        self.groups: dict[int, None] = {}
        self.commands: list[list[str]] = []
        self.trees: list[str] = []

    def note(self, line: str) -> None:
        """Takes one line of the owner."""
        kind, what = json.loads(line)
        if kind == "group":
            self.groups[int(what)] = None
        elif kind == "forget":
            self.groups.pop(int(what), None)
        elif kind == "command":
            self.commands.append(list(what))
        elif kind == "tree":
            self.trees.append(str(what))
        elif kind == "keep":
            self.trees.remove(str(what))

    def remove(self) -> None:
        """Kills the newest group first, so that nothing restarts what it depends on."""
        for group in reversed(self.groups):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for command in reversed(self.commands):
            with suppress(OSError):
                subprocess.run(
                    command,
                    check=False,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        for tree in self.trees:
            shutil.rmtree(tree, ignore_errors=True)


def main() -> None:
    """Waits for the owner's end, then removes what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    owner = os.getppid()
    leftovers = Leftovers()
    unread = b""
    while True:
        # A fork of the owner may hold the pipe open: the parent's pid tells as well.
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], OWNER_CHECK_SECONDS)
        received = os.read(sys.stdin.fileno(), 65536) if ready else b""
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            leftovers.note(line.decode())
        if (ready and not received) or os.getppid() != owner:
            break
    leftovers.remove()


if __name__ == "__main__":
    main()
