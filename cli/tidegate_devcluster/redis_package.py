"""redis-server from Debian's package, unpacked into the cache: no root, nothing installed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tidegate_devcluster.errors import ToolBuildError, ToolMissingError
from tidegate_devcluster.progress import Progress

REMEDY = (
    "install redis-server 7 or newer and put it on PATH (Debian and Ubuntu: `apt-get install "
    "redis-server`; others: https://redis.io/docs/latest/operate/oss_and_stack/install/)."
)
BINARY = Path("usr/bin/redis-server")


def cache_name() -> str:
    """Names the distribution release that the unpacked package belongs to."""
    release = platform.freedesktop_os_release()
    return f"redis-server-{release.get('ID')}{release.get('VERSION_ID', '')}-{platform.machine()}"


def library_path(folder: Path) -> str:
    """Returns LD_LIBRARY_PATH for the binary unpacked in the folder; empty where not needed."""
    return ":".join(sorted({str(lib.parent) for lib in folder.glob("usr/lib/**/*.so*")}))


def unpack(folder: Path, progress: Progress) -> None:
    """Downloads the package with the libraries this machine lacks and unpacks both.

    Raises:
        ToolMissingError: There is no apt-get, or it does not find the package.
        ToolBuildError: The unpacked binary does not run here.
    """
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ToolMissingError("redis-server", REMEDY)
    apt = _Apt(folder / "apt", progress)
    progress("redis-server: downloading Debian's package")
    apt.unpack(["redis-server", "redis-tools"], folder)
    if _missing_libraries(folder):
        apt.unpack(apt.libraries_of("redis-tools"), folder)
    missing = _missing_libraries(folder)
    if missing:
        raise ToolBuildError("redis-server", "ldd", f"libraries not found: {', '.join(missing)}")
    shutil.rmtree(apt.folder)
    progress("redis-server: unpacked")


class _Apt:
    """apt with folders of its own, so that neither root nor the machine's lists are needed."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self._progress = progress
        self._options: list[str] = []
        folder.mkdir()

    def unpack(self, packages: Sequence[str], into: Path) -> None:
        debs = self._download(packages)
        for deb in debs:
            _run(["dpkg-deb", "-x", str(deb), str(into)])
            deb.unlink()

    def libraries_of(self, package: str) -> list[str]:
        depends = _run(["apt-cache", *self._options, "depends", package]).stdout
        # A leading bar marks an alternative to the next line's package.
        return re.findall(r"^  Depends: (lib(?!c6)\S+)$", depends, re.MULTILINE)

    def _download(self, packages: Sequence[str]) -> list[Path]:
        command = ["apt-get", "download", *packages]
        if not self._try([*command[:1], *self._options, *command[1:]]):
            self._progress("redis-server: fetching Debian's package lists")
            self._use_own_lists()
            if not self._try(["apt-get", *self._options, "update"]) or not self._try(
                ["apt-get", *self._options, "download", *packages]
            ):
                raise ToolMissingError("redis-server", REMEDY)
        return sorted(self.folder.glob("*.deb"))

    def _use_own_lists(self) -> None:
        for name in ("lists/partial", "cache/archives/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._options = [
            f"-oDir::State::lists={self.folder / 'lists'}",
            f"-oDir::Cache={self.folder / 'cache'}",
            # As root, apt would drop to a user that may not write here.
            "-oAPT::Sandbox::User=root",
        ]

    def _try(self, command: Sequence[str]) -> bool:
        done = subprocess.run(
            command, cwd=self.folder, capture_output=True, check=False, stdin=subprocess.DEVNULL
        )
        return done.returncode == 0


def _missing_libraries(folder: Path) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(folder), "LC_ALL": "C"}
    listed = subprocess.run(
        ["ldd", str(folder / BINARY)], capture_output=True, text=True, check=False, env=env
    )
    return re.findall(r"^\s*(\S+) => not found$", listed.stdout, re.MULTILINE)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolBuildError("redis-server", " ".join(command[:2]), done.stderr)
    return done
