"""Fixtures of real parts: control plane, kubectl, Redis, and the whole development cluster.

Each is started once per session; a test gets a namespace, or a prefix, of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer

CRDS = Path(__file__).resolve().parents[3] / "crds"


@pytest.fixture(scope="session")
def assets() -> Assets:
    """The binaries of the cluster; `make tools` has prepared them."""
    return Assets.from_environment()


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
    kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRDS), check=True)


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
