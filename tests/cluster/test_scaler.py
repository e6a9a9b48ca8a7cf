"""Pools scale their workloads: the real operator, API server and kubectl, without kubelets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_policies.wire import TenantCounters
from tidegate_testing.operator_process import (
    Manifest,
    OperatorSetup,
    a_pod,
    a_pool,
    apply,
    make_ready,
    read,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine, reporting_engine

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("crds_installed", "operator"),
]


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


def a_workload(replicas: int | None = None, *, kind: str = "Deployment") -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": "engines"},
        "spec": {
            "selector": {"matchLabels": {"app": "engine"}},
            "template": {
                "metadata": {"labels": {"app": "engine"}},
                "spec": {"containers": [{"name": "engine", "image": "engine"}]},
            },
            **({"replicas": replicas} if replicas is not None else {}),
        },
    }


def a_scaled_pool(replicas: int | None = None, **spec: object) -> Manifest:
    pool = a_pool()
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}
    given = {"replicas": replicas} if replicas is not None else {}
    pool["spec"] |= {"workloadRef": ref, **given, **spec}
    return pool


def replicas_of(kubectl: Kubectl, kind: str, name: str, namespace: str) -> int | None:
    found: int | None = read(kubectl, kind, name, namespace)["spec"].get("replicas")
    return found


def wait_for_replicas(kubectl: Kubectl, namespace: str, number: int) -> None:
    wait_until(lambda: replicas_of(kubectl, "deploy", "engines", namespace) == number)


def scale(kubectl: Kubectl, namespace: str, what: str, number: int) -> None:
    kubectl("scale", what, f"--replicas={number}", "-n", namespace, check=True)


@pytest.mark.parametrize("options", [[], ["--server-side"]], ids=["client-side", "server-side"])
def test_a_pool_adopts_the_replicas_of_its_workload_and_scaling_it_by_hand_scales_that(
    kubectl: Kubectl, namespace: str, options: list[str]
) -> None:
    text = json.dumps(a_workload())
    kubectl("apply", *options, "-n", namespace, "-f", "-", input=text, check=True)
    apply(kubectl, namespace, a_scaled_pool())

    wait_until(lambda: replicas_of(kubectl, "epool", "chat", namespace) == 1)
    for number in (3, 0, 2):
        scale(kubectl, namespace, "epool/chat", number)
        wait_for_replicas(kubectl, namespace, number)
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")
    # Applied again, neither manifest takes the replicas back.
    kubectl("apply", *options, "-n", namespace, "-f", "-", input=text, check=True)
    apply(kubectl, namespace, a_scaled_pool())
    shown = json.loads(kubectl("get", "--raw", scale_path(namespace), check=True).stdout)
    assert shown["spec"]["replicas"] == 2
    assert shown["status"] == {"replicas": 0, "selector": "app=engine"}
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 2


def scale_path(namespace: str) -> str:
    return f"/apis/tidegate.io/v1alpha1/namespaces/{namespace}/enginepools/chat/scale"


def test_replicas_that_somebody_else_claims_are_reported_not_written_until_they_are_let_go(
    kubectl: Kubectl, namespace: str
) -> None:
    owner = ["apply", "--server-side", "--field-manager=gitops", "-n", namespace, "-f", "-"]
    kubectl(*owner, input=json.dumps(a_workload(replicas=2)), check=True)
    apply(kubectl, namespace, a_scaled_pool(replicas=4))

    pool = wait_for_conditions(
        kubectl, "epool", "chat", namespace, Accepted="ReplicasConflict", Ready="ReplicasConflict"
    )
    (message,) = (c["message"] for c in pool["status"]["conditions"] if c["type"] == "Accepted")
    assert "gitops" in message
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 2

    kubectl(*owner, input=json.dumps(a_workload()), check=True)
    wait_for_replicas(kubectl, namespace, 4)
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")


def test_a_workload_scaled_by_hand_is_not_fought_and_agreeing_heals_it(
    kubectl: Kubectl, namespace: str
) -> None:
    apply(kubectl, namespace, a_workload(), a_scaled_pool(replicas=3))
    wait_for_replicas(kubectl, namespace, 3)

    scale(kubectl, namespace, "deploy/engines", 5)
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="ReplicasConflict")
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 5

    scale(kubectl, namespace, "epool/chat", 5)
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")
    scale(kubectl, namespace, "epool/chat", 2)
    wait_for_replicas(kubectl, namespace, 2)


def test_a_workload_that_is_missing_is_named_and_scaled_once_it_is_there(
    kubectl: Kubectl, namespace: str
) -> None:
    apply(kubectl, namespace, a_scaled_pool(replicas=2))
    wait_for_conditions(
        kubectl, "epool", "chat", namespace, ResolvedRefs="WorkloadNotFound", Accepted="Accepted"
    )
    apply(kubectl, namespace, a_workload())
    wait_for_replicas(kubectl, namespace, 2)
    wait_for_conditions(kubectl, "epool", "chat", namespace, ResolvedRefs="ResolvedRefs")


@pytest.fixture
def three_engines(
    operator_setup: OperatorSetup, namespace: str, kubectl: Kubectl
) -> Iterator[list[ReportingEngine]]:
    """Ready engines of a pool of three, of which the last but one holds least."""
    apply(kubectl, namespace, a_workload(), a_scaled_pool(replicas=3))
    wait_for_replicas(kubectl, namespace, 3)
    names = [f"engine-{number}" for number in range(3)]
    apply(kubectl, namespace, *(a_pod(name) for name in names))
    pool, key = f"{namespace}/chat", operator_setup.public_key
    with (
        reporting_engine(operator_setup.redis_url, pool, names[0], key) as zero,
        reporting_engine(operator_setup.redis_url, pool, names[1], key) as one,
        reporting_engine(operator_setup.redis_url, pool, names[2], key) as two,
    ):
        engines = [zero, one, two]
        for engine, blocks in zip(engines, (9, 1, 5), strict=True):
            engine.tenants = [TenantCounters(tenant="t", running=1, kv_used_blocks=blocks)]
            make_ready(kubectl, namespace, engine.pod)
        wait_for_conditions(kubectl, "epool", "chat", namespace, Programmed="Programmed")
        yield engines


def marks(kubectl: Kubectl, namespace: str, pod: str) -> dict[str, str]:
    found = read(kubectl, "pod", pod, namespace)["metadata"].get("annotations", {})
    own = ("tidegate.io/draining", "controller.kubernetes.io/pod-deletion-cost")
    return {name: found[name] for name in own if name in found}


def ready_engines(kubectl: Kubectl, namespace: str) -> int:
    return int(read(kubectl, "epool", "chat", namespace)["status"]["engines"]["ready"])


def make_unready(kubectl: Kubectl, namespace: str, pod: str) -> None:
    status = json.dumps({"status": {"conditions": [{"type": "Ready", "status": "False"}]}})
    where = ["-n", namespace, "--subresource=status"]
    kubectl("patch", "pod", pod, *where, "-p", status, check=True)


def test_the_engine_that_loses_least_is_told_to_drain_and_leaves_once_it_is_not_ready(
    kubectl: Kubectl, namespace: str, three_engines: list[ReportingEngine]
) -> None:
    scale(kubectl, namespace, "epool/chat", 2)
    wait_until(lambda: three_engines[0].newest.drain.engines == ("engine-1",))
    assert marks(kubectl, namespace, "engine-1") == {
        "tidegate.io/draining": "scale-down",
        "controller.kubernetes.io/pod-deletion-cost": "-1000",
    }
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 3

    make_unready(kubectl, namespace, "engine-1")
    wait_for_replicas(kubectl, namespace, 2)
    assert marks(kubectl, namespace, "engine-0") == {}


def test_engines_go_on_when_the_pool_shall_not_shrink_after_all(
    kubectl: Kubectl, namespace: str, three_engines: list[ReportingEngine]
) -> None:
    scale(kubectl, namespace, "epool/chat", 1)
    wait_until(lambda: three_engines[0].newest.drain.engines == ("engine-1", "engine-2"))

    scale(kubectl, namespace, "epool/chat", 2)
    wait_until(lambda: three_engines[0].newest.drain.engines == ("engine-1",))
    scale(kubectl, namespace, "epool/chat", 3)
    wait_until(lambda: three_engines[0].newest.drain.engines == ())
    assert all(marks(kubectl, namespace, one.pod) == {} for one in three_engines)
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 3


def test_an_engine_with_a_timeout_is_waited_for_until_it_has_nothing_left(
    kubectl: Kubectl, namespace: str, three_engines: list[ReportingEngine]
) -> None:
    three_engines[1].running = 1
    patch = json.dumps({"spec": {"drain": {"timeout": "5m"}, "replicas": 2}})
    kubectl("patch", "epool", "chat", "-n", namespace, "--type=merge", "-p", patch, check=True)
    wait_until(lambda: three_engines[1].newest.drain.engines == ("engine-1",))
    assert three_engines[1].newest.drain.seconds == 300
    make_unready(kubectl, namespace, "engine-1")
    wait_until(lambda: ready_engines(kubectl, namespace) == 2)
    assert replicas_of(kubectl, "deploy", "engines", namespace) == 3

    three_engines[1].running = 0
    wait_for_replicas(kubectl, namespace, 2)


PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()


def test_the_pool_and_the_commands_of_the_page_work(kubectl: Kubectl, namespace: str) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    pool = yaml.safe_load(text)
    pool["metadata"]["namespace"] = namespace
    apply(kubectl, namespace, a_workload(), pool, a_pod("engines-0"))
    commands = re.findall(r"^    kubectl -n serving (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        kubectl("-n", namespace, *command.split(), check=True)
    wait_for_replicas(kubectl, namespace, 3)
    assert marks(kubectl, namespace, "engines-0") == {"tidegate.io/draining": "maintenance"}
    wait_for_conditions(kubectl, "epool", "chat", namespace, Accepted="Accepted")
