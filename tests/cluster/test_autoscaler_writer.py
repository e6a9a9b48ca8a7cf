"""Autoscalers follow the pools: the real operator and API server, without autoscalers that act."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing import keda
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_pool,
    apply,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds_installed", "operator"),
]

PROMETHEUS = "http://prometheus.monitoring:9090"


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(replace(operator_setup, prometheus_url=PROMETHEUS)):
        yield


def a_scaled_pool(driver: str, **scaling: object) -> Manifest:
    pool = a_pool()
    pool["spec"] |= {
        "workloadRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"},
        "autoscaling": {"driver": driver, "maxReplicas": 5, **scaling},
    }
    return pool


def autoscalers(kubectl: Kubectl, kind: str, namespace: str) -> list[Any]:
    shown = kubectl("get", kind, "-n", namespace, "-o", "json", "--show-managed-fields", check=True)
    items: list[Any] = json.loads(shown.stdout)["items"]
    return items


def test_the_hpa_is_written_updated_put_right_and_removed(kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, a_scaled_pool("HPA"))
    wait_until(lambda: len(autoscalers(kubectl, "hpa", namespace)) == 1)
    (hpa,) = autoscalers(kubectl, "hpa", namespace)
    pool = read(kubectl, "epool", "chat", namespace)
    assert hpa["metadata"]["name"] == "tidegate-chat"
    assert hpa["metadata"]["ownerReferences"][0]["uid"] == pool["metadata"]["uid"]
    assert hpa["spec"]["scaleTargetRef"]["kind"] == "EnginePool"
    assert {rules["tolerance"] for rules in hpa["spec"]["behavior"].values()} == {"0"}
    (entry,) = hpa["metadata"]["managedFields"]
    assert (entry["manager"], entry["operation"]) == ("tidegate", "Apply")

    apply(kubectl, namespace, a_scaled_pool("HPA", maxReplicas=7, minReplicas=2))
    wait_until(lambda: bounds(kubectl, namespace) == (2, 7))

    kubectl("delete", "hpa", "tidegate-chat", "-n", namespace, check=True)
    apply(kubectl, namespace, a_scaled_pool("HPA", maxReplicas=8))
    wait_until(lambda: bounds(kubectl, namespace) == (1, 8))

    apply(kubectl, namespace, a_scaled_pool("None"))
    wait_until(lambda: autoscalers(kubectl, "hpa", namespace) == [])


def bounds(kubectl: Kubectl, namespace: str) -> tuple[int, int] | None:
    for hpa in autoscalers(kubectl, "hpa", namespace):
        return hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]
    return None


def test_an_autoscaler_of_somebody_else_is_let_alone(kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, a_scaled_pool("HPA"))
    target = ["autoscale", "deployment", "engines", "--max=2", "-n", namespace]
    kubectl("create", "deployment", "engines", "--image=x", "-n", namespace, check=True)
    kubectl(*target, check=True)
    wait_until(lambda: len(autoscalers(kubectl, "hpa", namespace)) == 2)
    apply(kubectl, namespace, a_scaled_pool("None"))
    wait_until(lambda: len(autoscalers(kubectl, "hpa", namespace)) == 1)
    (hpa,) = autoscalers(kubectl, "hpa", namespace)
    assert hpa["metadata"]["name"] == "engines"


def test_a_driver_that_the_cluster_lacks_is_reported(kubectl: Kubectl, namespace: str) -> None:
    apply(kubectl, namespace, a_scaled_pool("KEDA"))
    pool = wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Invalid")
    (message,) = (c["message"] for c in pool["status"]["conditions"] if c["type"] == "Accepted")
    assert "scaledobjects.keda.sh" in message

    apply(kubectl, namespace, a_scaled_pool("HPA"))
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")


def test_a_scaled_object_that_is_refused_is_reported_and_one_that_fits_is_written_and_removed(
    kubectl: Kubectl, namespace: str
) -> None:
    """By the definitions that KEDA publishes: of a release too old, the oldest and the newest."""
    with keda.installed(kubectl, keda.TOO_OLD):
        apply(kubectl, namespace, a_scaled_pool("KEDA", minReplicas=0))
        pool = wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Invalid")
        (message,) = (c["message"] for c in pool["status"]["conditions"] if c["type"] == "Accepted")
        assert "tolerance" in message

        for most, release in enumerate((keda.OLDEST, keda.NEWEST), 6):
            keda.install(kubectl, release)
            # The operator would try again only after a while.
            wait_until(lambda: knows_tolerance(kubectl, namespace))
            apply(kubectl, namespace, a_scaled_pool("KEDA", minReplicas=0, maxReplicas=most))
            wait_until(lambda: maximum(kubectl, namespace) == most)  # noqa: B023
            wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")
        (scaled,) = autoscalers(kubectl, "so", namespace)
        target = {"apiVersion": "tidegate.io/v1alpha1", "kind": "EnginePool", "name": "chat"}
        assert scaled["spec"]["scaleTargetRef"] == target
        assert scaled["spec"]["minReplicaCount"] == 0
        assert scaled["spec"]["fallback"] == {
            "failureThreshold": 3,
            "replicas": 1,
            "behavior": "currentReplicasIfHigher",
        }
        rules = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert {one["tolerance"] for one in rules.values()} == {"0"}
        (trigger,) = scaled["spec"]["triggers"]
        assert trigger["metadata"]["serverAddress"] == PROMETHEUS
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        (entry,) = scaled["metadata"]["managedFields"]
        assert (entry["manager"], entry["operation"]) == ("tidegate", "Apply")

        apply(kubectl, namespace, a_scaled_pool("HPA"))
        wait_until(lambda: len(autoscalers(kubectl, "hpa", namespace)) == 1)
        wait_until(lambda: autoscalers(kubectl, "so", namespace) == [])


def knows_tolerance(kubectl: Kubectl, namespace: str) -> bool:
    """Whether the API server goes by a definition already that has it."""
    rules = {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": {"tolerance": "0"}}}}
    scaled = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"name": "x"},
            "triggers": [{"type": "cron", "metadata": {}}],
            "advanced": rules,
        },
    }
    dry_run = ("apply", "--server-side", "--dry-run=server", "-f", "-")
    return kubectl(*dry_run, input=json.dumps(scaled)).returncode == 0


def maximum(kubectl: Kubectl, namespace: str) -> int | None:
    for scaled in autoscalers(kubectl, "so", namespace):
        return int(scaled["spec"]["maxReplicaCount"])
    return None
