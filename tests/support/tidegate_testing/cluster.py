"""Fixtures of real parts: control plane, kubectl, Redis, and the whole development cluster.

Each is started once per session; a test gets a namespace, or a prefix, of its own.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.cluster import DevCluster
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.helm import Helm

T = TypeVar("T")

IMAGES: Mapping[str, Sequence[str]] = {
    "python": [sys.executable],
    "tidegate/engine": [sys.executable, "-m", "tidegate_engine"],
    # Of the charts, as of now and as if there had been an earlier one.
    **{
        f"tidegate/{part}:{version}": [sys.executable, "-m"]
        for part in ("operator", "engine")
        for version in ("0.0.9", "0.1.0")
    },
}
POLL_SECONDS = 0.05
CRDS = Path(__file__).resolve().parents[3] / "crds"


@pytest.fixture(scope="session")
def assets() -> Assets:
    """The binaries of the cluster; `make tools` has prepared them."""
    return Assets.from_environment()


@pytest.fixture(scope="session")
def helm(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The real Helm, without a cluster."""
    return Helm(assets.tool("helm"), tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def control_plane(
    assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """etcd and kube-apiserver, without controllers: no Pod runs and no namespace ends."""
    root = tmp_path_factory.mktemp("control-plane")
    with ControlPlane(root, assets, controllers=False) as started:
        yield started


@pytest.fixture(scope="session")
def kubectl(
    assets: Assets, control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Kubectl:
    """The real kubectl as administrator: `kubectl("get", "pods", input=None)`."""
    cache = tmp_path_factory.mktemp("kubectl-cache")
    return Kubectl(assets.tool("kubectl"), control_plane.kubeconfig, cache)


@pytest.fixture(scope="session")
def crds_installed(kubectl: Kubectl) -> None:
    """Tidegate's custom resource definitions, served."""
    install_crds(kubectl)


def install_crds(kubectl: Kubectl) -> None:
    """Applies crds/ and waits until the API server serves the kinds."""
    kubectl("apply", "--server-side", "-f", str(CRDS), check=True)
    wait = ("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS))
    # kubectl fails at once on an object that has no conditions yet.
    eventually(lambda: kubectl(*wait).returncode == 0, "the kinds are served")


@pytest.fixture
def namespace(kubectl: Kubectl) -> str:
    """A fresh namespace; it stays, as nothing here would finish its deletion."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    kubectl("create", "namespace", name, check=True)
    return name


@dataclass(frozen=True)
class RedisSpace:
    """A place in the shared Redis that no other test uses.

    Attributes:
        prefix: For the names of all keys and channels, with a colon at its end.
    """

    url: str
    prefix: str


@pytest.fixture(scope="session")
def redis_server(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A real Redis for the session; use `redis_space` where keys may collide."""
    with RedisServer(tmp_path_factory.mktemp("redis"), assets) as started:
        yield started


@pytest.fixture
def redis_space(redis_server: RedisServer) -> RedisSpace:
    """A prefix of its own in the session's Redis."""
    return RedisSpace(redis_server.url, f"test-{uuid.uuid4().hex[:10]}:")


class RunningCluster:
    """A DevCluster in a thread of its own, for tests that aren't written around its event loop.

    Attributes:
        cluster: Touch what needs its event loop by `call` alone.
    """

    def __init__(self, cluster: DevCluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self.kubeconfig = cluster.kubeconfig
        self.redis = cluster.redis
        self.host_address = cluster.kubelet.host_address
        self._loop = loop

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,  # noqa: A002 - named as in subprocess.run
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs the real kubectl as administrator; raises where it fails unless told not to."""
        return self.cluster.kubectl(*arguments, input=input, check=check)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine in the cluster's event loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def address(self, namespace: str, service: str, port: str | None = None) -> str:
        """Returns "127.0.0.1:PORT" of the Service, see ServiceProxy.address."""

        async def ask() -> str:
            return self.cluster.proxy.address(namespace, service, port)

        return self.call(ask())

    def log(self, namespace: str, pod: str, container: str) -> str:
        """Returns what the container has printed; nothing before its first start."""
        path = self.cluster.kubelet.log(namespace, pod, container)
        return path.read_text() if path.exists() else ""

    def fresh_namespace(self) -> str:
        """Makes a namespace that admits pods."""
        name = f"test-{uuid.uuid4().hex[:10]}"
        self.kubectl("create", "namespace", name)
        self.kubectl(
            *("wait", "--for=create", "--timeout=30s"), *("serviceaccount/default", "-n", name)
        )
        return name


@contextmanager
def running_cluster(
    assets: Assets, root: Path, images: Mapping[str, Sequence[str]], **options: Any
) -> Iterator[RunningCluster]:
    """Runs a DevCluster; further options are its own. Nothing is left on exit but `root`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="devcluster")
    thread.start()
    try:
        cluster = DevCluster(images=images, root=root, assets=assets, **options)
        asyncio.run_coroutine_threadsafe(cluster.__aenter__(), loop).result()
        try:
            yield RunningCluster(cluster, loop)
        finally:
            leaving = cluster.__aexit__(None, None, None)
            asyncio.run_coroutine_threadsafe(leaving, loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@pytest.fixture(scope="session")
def full_cluster(
    assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningCluster]:
    """Control plane with controllers, process kubelet, service proxy and Redis.

    Runs IMAGES, and redis-server under the name that the chart has for it.
    """
    root = tmp_path_factory.mktemp("cluster")
    tool = assets.tool("redis-server")
    variables = [f"{name}={value}" for name, value in tool.environment.items()]
    redis = {"redis:7.4-alpine": ["env", *variables, str(tool.path)]}
    with running_cluster(assets, root, {**IMAGES, **redis}) as running:
        yield running


@pytest.fixture
def cluster_namespace(full_cluster: RunningCluster) -> Iterator[str]:
    """A fresh namespace of the full cluster; its pods end with the test."""
    name = full_cluster.fresh_namespace()
    yield name
    full_cluster.kubectl("delete", "namespace", name, "--wait=false")


def still_running(descendants: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Returns those that have not ended; a zombie has."""
    running = []
    for one in descendants:
        with suppress(psutil.NoSuchProcess):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                running.append(one)
    return running


def network_names() -> str:
    """Returns what `ip` shows of this machine's namespaces and links; nothing without `ip`."""
    if shutil.which("ip") is None:
        return ""
    shown = [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=False).stdout
        for what in (["netns"], ["-o", "link"])
    ]
    return "".join(shown)


def eventually(ask: Callable[[], T], what: str, *, timeout_seconds: float = 30.0) -> T:
    """Asks until the answer is true and returns it.

    Raises:
        AssertionError: It never was; says what was waited for and the last answer.
    """
    deadline = time.monotonic() + timeout_seconds
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_seconds:g} s for {what}; last: {answer!r}")
        time.sleep(POLL_SECONDS)
    return answer
