"""Folders made once and then found: complete or absent, never half done."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tidegate_devcluster.errors import ToolBuildError
from tidegate_devcluster.progress import Progress

POLL_SECONDS = 0.1


class ToolCache:
    """Folders by key, each filled by the first that asks for it.

    The key must name everything the content depends on: a folder is never refreshed.

    Attributes:
        given_up: Set when nobody wants the folders any more, from any thread: who waits for
            another process ends by ToolBuildError, and so should who fills.
    """

    def __init__(self, root: Path, progress: Progress) -> None:
        self.given_up = threading.Event()
        self._root = root
        self._progress = progress

    def folder(self, key: str, fill: Callable[[Path], None]) -> Path:
        """Returns the folder of the key, after `fill` has put its content there if it was absent.

        `fill` gets an empty folder that is renamed when it returns: an interrupted or failed one
        leaves nothing that a later call could take for complete. Two processes never fill the
        same key at once; the second waits and finds it.
        """
        target = self._root / key
        if target.is_dir():
            return target
        self._root.mkdir(parents=True, exist_ok=True)
        with self._lock(key):
            if not target.is_dir():
                self._fill(key, target, fill)
        return target

    def _fill(self, key: str, target: Path, fill: Callable[[Path], None]) -> None:
        for leftover in self._root.glob(f"{key}.part.*"):
            shutil.rmtree(leftover, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f"{key}.part.", dir=self._root))
        try:
            part.chmod(0o755)
            fill(part)
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        # The lock goes with the process that holds it, so a killed one blocks nobody.
        with (self._root / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._progress(f"{key}: waiting for another process that is making it")
                self._wait_for_lock(key, file)
            yield

    def _wait_for_lock(self, key: str, file: TextIO) -> None:
        while not self.given_up.wait(POLL_SECONDS):
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
        raise ToolBuildError(key, "flock", "given up")
