"""What the tests of the operator share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.operator_process import OperatorSetup, a_pod, a_pool, apply, make_ready
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine


@pytest.fixture(scope="session")
def operator_setup(
    control_plane: ControlPlane,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> OperatorSetup:
    """How to run an operator for all namespaces."""
    return OperatorSetup(
        kubeconfig=control_plane.kubeconfig,
        redis_url=redis_server.url,
        directory=tmp_path_factory.mktemp("operator"),
    )


@pytest.fixture
def engines(
    operator_setup: OperatorSetup, namespace: str, kubectl: Kubectl
) -> Iterator[list[ReportingEngine]]:
    """A pool `chat` with two ready engines."""
    apply(kubectl, namespace, a_pool(), a_pod("engine-0"), a_pod("engine-1"))
    make_ready(kubectl, namespace, "engine-0")
    make_ready(kubectl, namespace, "engine-1")
    pool, key = f"{namespace}/chat", operator_setup.public_key
    with (
        reporting_engine(operator_setup.redis_url, pool, "engine-0", key) as zero,
        reporting_engine(operator_setup.redis_url, pool, "engine-1", key) as one,
    ):
        yield [zero, one]
