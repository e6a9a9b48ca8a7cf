"""The Go tools under `tools/`: which there are, and how one is built from its module."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidegate_devcluster.errors import ToolBuildError, ToolMissingError
from tidegate_devcluster.progress import INTERVAL_SECONDS, Progress
from tidegate_devcluster.tool_cache import POLL_SECONDS, ToolCache

TAIL_LINES = 30


@dataclass(frozen=True)
class GoTool:
    """One binary of a Go module under `tools/`.

    Attributes:
        module: Folder under `tools/`; its go.mod is the one source of the version.
        package: Import path of the package main.
    """

    name: str
    module: str
    package: str


GO_TOOLS = {
    tool.name: tool
    for tool in (
        # The API server first: it takes longest, and most tests need nothing else.
        GoTool("kube-apiserver", "kubernetes", "k8s.io/kubernetes/cmd/kube-apiserver"),
        GoTool("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
        GoTool(
            "kube-controller-manager",
            "kubernetes",
            "k8s.io/kubernetes/cmd/kube-controller-manager",
        ),
        GoTool("kube-scheduler", "kubernetes", "k8s.io/kubernetes/cmd/kube-scheduler"),
        GoTool("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
    )
}


class GoBuilder:
    """Builds Go tools into the cache, keyed by what decides their content."""

    def __init__(self, modules: Path, cache: ToolCache, progress: Progress) -> None:
        """Takes the folder of the Go modules (`tools/` of a checkout)."""
        self._modules = modules
        self._cache = cache
        self._progress = progress

    def binary(self, tool: GoTool) -> Path:
        """Returns the tool's binary, building it first where the cache lacks it.

        Raises:
            ToolMissingError: Go or the module's source is missing.
            ToolBuildError: Go failed.
        """
        module = self._modules / tool.module
        if not (module / "go.mod").is_file():
            raise ToolMissingError(
                tool.name,
                f"it is built from {module}, which is not there. Run from a checkout of Tidegate, "
                "or set KUBEBUILDER_ASSETS to a folder that holds the binary.",
            )
        flags = _build_flags(module)
        key = f"{tool.name}-{_content_hash(module, tool, flags)}"
        folder = self._cache.folder(key, lambda part: self._build(tool, module, flags, part))
        return folder / tool.name

    def _build(self, tool: GoTool, module: Path, flags: Sequence[str], into: Path) -> None:
        go = shutil.which("go")
        if go is None:
            raise ToolMissingError(
                tool.name,
                f"building it needs Go {_go_version(module)} or newer, and there is no `go` on "
                "PATH. Install Go (https://go.dev/doc/install, or your distribution's package "
                "where it is new enough), or set KUBEBUILDER_ASSETS to a folder that holds etcd, "
                "kube-apiserver, kube-controller-manager and kube-scheduler.",
            )
        self._progress(f"{tool.name}: downloading modules (the first time, a few minutes)")
        packages = _Run(
            tool.name,
            [go, "list", "-deps", tool.package],
            module,
            lambda seen: self._progress(f"{tool.name}: downloading modules, {seen} so far"),
            given_up=self._cache.given_up,
            counted="go: downloading ",
        ).output()
        total = packages.count("\n")
        self._progress(f"{tool.name}: building {total} packages")
        _Run(
            tool.name,
            [go, "build", "-v", *flags, "-o", str(into / tool.name), tool.package],
            module,
            # Packages in Go's own cache are not compiled again and so not counted.
            lambda seen: self._progress(f"{tool.name}: building, {seen}/{total} packages compiled"),
            given_up=self._cache.given_up,
        ).output()
        self._progress(f"{tool.name}: built")


class _Run:
    """One run of Go that reports how many lines it has printed to standard error."""

    def __init__(
        self,
        tool: str,
        command: Sequence[str],
        cwd: Path,
        report: Callable[[int], None],
        *,
        given_up: threading.Event,
        counted: str = "",
    ) -> None:
        self._tool = tool
        self._command = command
        self._cwd = cwd
        self._report = report
        self._given_up = given_up
        self._counted = counted
        self._seen = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._stdout = ""

    def output(self) -> str:
        """Runs to the end and returns standard output."""
        # GOWORK: a go.work above the checkout must not change what is built.
        env = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
        with subprocess.Popen(
            self._command,
            cwd=self._cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A group of its own, so that its compilers can be ended with it.
            start_new_session=True,
        ) as go:
            readers = [
                threading.Thread(target=self._read_stdout, args=(go,), daemon=True),
                threading.Thread(target=self._read_stderr, args=(go,), daemon=True),
            ]
            for reader in readers:
                reader.start()
            try:
                self._wait(go)
            finally:
                if go.poll() is None:
                    os.killpg(go.pid, signal.SIGKILL)
                for reader in readers:
                    reader.join()
        if go.returncode != 0:
            raise self._error("\n".join(self._tail))
        return self._stdout

    def _wait(self, go: subprocess.Popen[str]) -> None:
        reported_at = time.monotonic()
        while go.poll() is None:
            if self._given_up.wait(POLL_SECONDS):
                raise self._error("given up")
            if time.monotonic() - reported_at > INTERVAL_SECONDS:
                self._report(self._seen)
                reported_at = time.monotonic()

    def _error(self, output: str) -> ToolBuildError:
        return ToolBuildError(self._tool, " ".join(self._command[:2]), output)

    def _read_stdout(self, go: subprocess.Popen[str]) -> None:
        if go.stdout is not None:
            self._stdout = go.stdout.read()

    def _read_stderr(self, go: subprocess.Popen[str]) -> None:
        for line in go.stderr or ():
            self._tail.append(line.rstrip())
            self._seen += line.startswith(self._counted)


def _build_flags(module: Path) -> list[str]:
    stamp = ["-s", "-w"]
    kubernetes = re.search(
        r"^require k8s\.io/kubernetes (v(\d+)\.(\d+)\.\S+)$",
        (module / "go.mod").read_text(),
        re.MULTILINE,
    )
    if kubernetes is not None:
        # A build from a module reports v0.0.0-master, which breaks version checks of clients.
        version, major, minor = kubernetes.groups()
        base = "k8s.io/component-base/version"
        stamp += [f"-X {base}.gitVersion={version}", f"-X {base}.gitMajor={major}"]
        stamp += [f"-X {base}.gitMinor={minor}"]
        stamp += [f"-X k8s.io/client-go/pkg/version.gitVersion={version}"]
    return ["-trimpath", "-ldflags", " ".join(stamp)]


def _content_hash(module: Path, tool: GoTool, flags: Sequence[str]) -> str:
    content = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        content.update((module / name).read_bytes())
    content.update("\0".join([tool.package, platform.machine(), *flags]).encode())
    return content.hexdigest()[:16]


def _go_version(module: Path) -> str:
    found = re.search(r"^go (\d+\.\d+)", (module / "go.mod").read_text(), re.MULTILINE)
    return found.group(1) if found else "1.26"
