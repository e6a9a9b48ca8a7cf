"""What the tests of the operator share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.helm import (
    OPERATOR,
    OPERATOR_LEASE,
    OPERATOR_NAMESPACE,
    Helm,
    operator_kubeconfig,
)
from tidegate_testing.operator_process import OperatorSetup, a_pod, a_pool, apply, make_ready
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine


@pytest.fixture(scope="session", name="operator_kubeconfig")
def operator_kubeconfig_fixture(control_plane: ControlPlane, kubectl: Kubectl, helm: Helm) -> Path:
    """Of the chart's ServiceAccount, with the rights that the chart gives it and no others."""
    return operator_kubeconfig(control_plane, kubectl, helm)


@pytest.fixture
def operator_lease(kubectl: Kubectl, operator_kubeconfig: Path) -> str:  # noqa: ARG001
    """The Lease that the chart's ServiceAccount may write; there is none yet."""
    where = ("-n", OPERATOR_NAMESPACE, "--ignore-not-found")
    kubectl("delete", "lease", OPERATOR, *where, check=True)
    return OPERATOR_LEASE


@pytest.fixture(scope="session")
def operator_setup(
    operator_kubeconfig: Path,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> OperatorSetup:
    """How to run an operator for all namespaces, as the chart would."""
    return OperatorSetup(
        kubeconfig=operator_kubeconfig,
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
