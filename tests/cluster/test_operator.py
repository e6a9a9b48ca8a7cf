"""The real operator against the real API server and Redis, with engines that speak the protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.operator import (
    OperatorSetup,
    apply,
    running_operator,
    wait_for_conditions,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

POOL: dict[str, Any] = {
    "apiVersion": "tidegate.io/v1alpha1",
    "kind": "EnginePool",
    "metadata": {"name": "chat"},
    "spec": {"selector": {"matchLabels": {"app": "engine"}}},
}


def a_policy(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": name},
        "spec": {"poolRefs": [{"name": "chat"}], **spec},
    }


def a_pod(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "engine"}},
        "spec": {"containers": [{"name": "engine", "image": "engine"}]},
    }


def make_ready(kubectl: Kubectl, namespace: str, pod: str) -> None:
    status = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    kubectl(
        "patch",
        "pod",
        pod,
        "-n",
        namespace,
        "--subresource=status",
        "-p",
        json.dumps(status),
        check=True,
    )


@pytest.fixture
def setup(
    control_plane: ControlPlane, redis_server: RedisServer, namespace: str, tmp_path: Path
) -> OperatorSetup:
    return OperatorSetup(
        kubeconfig=control_plane.kubeconfig,
        redis_url=redis_server.url,
        directory=tmp_path,
        namespaces=(namespace,),
    )


@pytest.fixture
def engines(
    setup: OperatorSetup, namespace: str, kubectl: Kubectl
) -> Iterator[list[ReportingEngine]]:
    apply(kubectl, namespace, POOL, a_pod("engine-0"), a_pod("engine-1"))
    make_ready(kubectl, namespace, "engine-0")
    make_ready(kubectl, namespace, "engine-1")
    pool, key = f"{namespace}/chat", setup.public_key
    with (
        reporting_engine(setup.redis_url, pool, "engine-0", key) as zero,
        reporting_engine(setup.redis_url, pool, "engine-1", key) as one,
    ):
        yield [zero, one]


@pytest.fixture
def operator(setup: OperatorSetup) -> Iterator[None]:
    with running_operator(setup):
        yield


@pytest.mark.usefixtures("operator")
def test_applied_policy_is_run_by_every_engine_and_said_so(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_policy("gold", weight=300, rate={"requestsPerMinute": 5}))
    policy = wait_for_conditions(
        kubectl,
        "tp",
        "gold",
        namespace,
        Accepted="Accepted",
        Programmed="Programmed",
        Ready="Ready",
    )
    tenant = f"{namespace}/gold"
    assert policy["status"]["tenant"] == tenant
    (entry,) = policy["status"]["pools"]
    for engine in engines:
        assert engine.revision >= entry["revision"]
        assert engine.newest.tenant_rules[tenant].weight == 300
    (message,) = (c["message"] for c in policy["status"]["conditions"] if c["type"] == "Accepted")
    assert "not enforced yet: spec.rate" in message
    pool = wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="Programmed")
    assert pool["status"]["engines"] == {"ready": 2, "programmed": 2, "summary": "2/2"}
    assert pool["status"]["selector"] == "app=engine"
