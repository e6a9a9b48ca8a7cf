"""Binaries from Debian's packages, unpacked into the cache: no root, nothing installed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tidegate_devcluster.errors import ToolBuildError, ToolMissingError
from tidegate_devcluster.progress import Progress


@dataclass(frozen=True, kw_only=True)
class DebianPackage:
    """Packages that hold a binary.

    Attributes:
        name: Of the first; the cache calls it so.
        packages: All that are unpacked.
        libraries_of: The one whose libraries are unpacked, too, where this machine lacks some;
            empty = the binary needs none.
        remedy: What people do where there is no such package.
        folder: Where the packages have their binaries.
    """

    name: str
    packages: tuple[str, ...]
    remedy: str
    libraries_of: str = ""
    folder: Path = Path("usr/bin")

    @property
    def cache_name(self) -> str:
        """Names the distribution release that the unpacked package belongs to."""
        release = platform.freedesktop_os_release()
        system = f"{release.get('ID')}{release.get('VERSION_ID', '')}-{platform.machine()}"
        return f"{self.name}-{system}"

    def unpack(self, binary: Path, folder: Path, progress: Progress) -> None:
        """Downloads the packages with the libraries this machine lacks and unpacks all.

        Args:
            binary: The one that is wanted, by its path in them.
            folder: Empty.
            progress: Told of what takes long.

        Raises:
            ToolMissingError: There is no apt-get, or it does not find a package.
            ToolBuildError: The unpacked binary does not run here.
        """
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise ToolMissingError(self.name, self.remedy)
        apt = _Apt(self, folder / "apt", progress)
        progress(f"{self.name}: downloading Debian's package")
        apt.unpack(self.packages, folder)
        if self.libraries_of and _missing_libraries(folder, binary):
            apt.unpack(apt.libraries_of(self.libraries_of), folder)
        missing = _missing_libraries(folder, binary)
        if missing:
            problem = f"libraries not found: {', '.join(missing)}"
            raise ToolBuildError(self.name, "ldd", problem)
        shutil.rmtree(apt.folder)
        progress(f"{self.name}: unpacked")


REDIS = DebianPackage(
    name="redis-server",
    packages=("redis-server", "redis-tools"),
    libraries_of="redis-tools",
    remedy="install redis-server 7 or newer and put it on PATH (Debian and Ubuntu: `apt-get "
    "install redis-server`; others: https://redis.io/docs/latest/operate/oss_and_stack/install/).",
)
PROMETHEUS = DebianPackage(
    name="prometheus",
    packages=("prometheus",),
    remedy="install prometheus 2.40 or newer with its promtool and put both on PATH (Debian and "
    "Ubuntu: `apt-get install prometheus`; others: https://prometheus.io/download/).",
)
CHROMIUM = DebianPackage(
    name="chromium-headless-shell",
    packages=("chromium-headless-shell", "chromium-common"),
    libraries_of="chromium-headless-shell",
    remedy="install Chromium's headless shell and put it on PATH (Debian: `apt-get install "
    "chromium-headless-shell`).",
    # What is in usr/bin is a script that runs the one installed on the machine.
    folder=Path("usr/lib/chromium"),
)
PACKAGES: Mapping[str, DebianPackage] = MappingProxyType(
    {
        "redis-server": REDIS,
        "prometheus": PROMETHEUS,
        "promtool": PROMETHEUS,
        "chromium-headless-shell": CHROMIUM,
    }
)
"""The package of each binary."""


def binary_path(tool: str) -> Path:
    """Returns where a package has the binary."""
    return PACKAGES[tool].folder / tool


def library_path(folder: Path) -> str:
    """Returns LD_LIBRARY_PATH for a binary unpacked in the folder; empty where not needed."""
    return ":".join(sorted({str(lib.parent) for lib in folder.glob("usr/lib/**/*.so*")}))


class _Apt:
    """apt with folders of its own, so that neither root nor the machine's lists are needed."""

    def __init__(self, package: DebianPackage, folder: Path, progress: Progress) -> None:
        self.folder = folder
        self._package = package
        self._progress = progress
        self._options: list[str] = []
        folder.mkdir()

    def unpack(self, packages: Sequence[str], into: Path) -> None:
        debs = self._download(packages)
        for deb in debs:
            _run(["dpkg-deb", "-x", str(deb), str(into)])
            deb.unlink()

    def libraries_of(self, package: str) -> list[str]:
        """Returns the libraries that installing the package would bring to this machine."""
        command = ["apt-get", *self._options, "--simulate", "--no-install-recommends", "install"]
        planned = _run([*command, package]).stdout
        return re.findall(r"^Inst (lib(?!c6)\S+) ", planned, re.MULTILINE)

    def _download(self, packages: Sequence[str]) -> list[Path]:
        command = ["apt-get", "download", *packages]
        if not self._try([*command[:1], *self._options, *command[1:]]):
            self._progress(f"{self._package.name}: fetching Debian's package lists")
            self._use_own_lists()
            if not self._try(["apt-get", *self._options, "update"]) or not self._try(
                ["apt-get", *self._options, "download", *packages]
            ):
                raise ToolMissingError(self._package.name, self._package.remedy)
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


def _missing_libraries(folder: Path, binary: Path) -> list[str]:
    env = {**os.environ, "LD_LIBRARY_PATH": library_path(folder), "LC_ALL": "C"}
    listed = subprocess.run(
        ["ldd", str(folder / binary)], capture_output=True, text=True, check=False, env=env
    )
    return re.findall(r"^\s*(\S+) => not found$", listed.stdout, re.MULTILINE)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolBuildError("redis-server", " ".join(command[:2]), done.stderr)
    return done
