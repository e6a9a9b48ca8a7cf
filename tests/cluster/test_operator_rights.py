"""What the chart's ServiceAccount may do, and what it must not, asked of the real API server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.kubectl import Kubectl
from tidegate_operator.watch_cache import key_digest
from tidegate_testing.helm import OPERATOR, Helm, operator_kubeconfig
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_key_secret,
    a_policy,
    a_pool,
    apply,
    running_operator,
    wait_for_conditions,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

KINDS = ("tenantpolicies", "enginepools", "prioritytiers", "preemptionpolicies", "servicelevels")

MayI = Callable[..., bool]


def user_of(namespace: str) -> str:
    return f"system:serviceaccount:{namespace}:{OPERATOR}"


def asking(kubectl: Kubectl, user: str) -> MayI:
    def may(verb: str, resource: str, namespace: str = "") -> bool:
        where = [f"--namespace={namespace}"] if namespace else ["--all-namespaces"]
        kind, _, subresource = resource.partition("#")
        sub = [f"--subresource={subresource}"] if subresource else []
        asked = kubectl("auth", "can-i", verb, kind, *sub, f"--as={user}", *where)
        return asked.stdout.strip() == "yes"

    return may


@pytest.fixture
def elsewhere(kubectl: Kubectl) -> str:
    name = f"test-{uuid.uuid4().hex[:10]}"
    kubectl("create", "namespace", name, check=True)
    return name


def test_operator_of_all_namespaces_may_do_its_work_and_nothing_else(
    helm: Helm, kubectl: Kubectl, control_plane: ControlPlane, namespace: str, elsewhere: str
) -> None:
    operator_kubeconfig(
        control_plane, kubectl, helm, namespace=namespace, apiKeyNamespaces=[namespace]
    )
    may = asking(kubectl, user_of(namespace))
    for kind in KINDS:
        assert may("watch", f"{kind}.tidegate.io")
        assert may("patch", f"{kind}.tidegate.io#status")
        for verb in ("create", "update", "patch", "delete"):
            assert not may(verb, f"{kind}.tidegate.io"), (verb, kind)
    allowed = {
        ("watch", "namespaces", ""),
        ("patch", "pods", ""),
        ("get", "deployments.apps", ""),
        ("patch", "deployments.apps#scale", ""),
        ("patch", "enginepools.tidegate.io#scale", ""),
        ("list", "secrets", namespace),
        ("create", "leases.coordination.k8s.io", namespace),
        ("create", "events.events.k8s.io", ""),
        ("patch", "events.events.k8s.io", ""),
    }
    assert {question for question in allowed if not may(*question)} == set()
    forbidden = {
        *((verb, "secrets", elsewhere) for verb in ("get", "list", "watch")),
        *((verb, "secrets", namespace) for verb in ("create", "patch", "update", "delete")),
        ("list", "secrets", ""),
        ("delete", "pods", ""),
        ("create", "pods", namespace),
        ("create", "pods#exec", namespace),
        ("patch", "namespaces", ""),
        *((verb, "events.events.k8s.io", "") for verb in ("list", "delete")),
        ("create", "events", ""),
        ("patch", "deployments.apps", ""),
        ("list", "deployments.apps", ""),
        ("get", "configmaps", namespace),
        ("create", "leases.coordination.k8s.io", elsewhere),
        ("update", "leases.coordination.k8s.io", namespace),
        ("get", "customresourcedefinitions.apiextensions.k8s.io", ""),
        ("escalate", "clusterroles.rbac.authorization.k8s.io", ""),
        ("impersonate", "users", ""),
        ("create", "serviceaccounts#token", namespace),
        ("*", "*", ""),
    }
    assert {question for question in forbidden if may(*question)} == set()


def test_operator_of_some_namespaces_knows_nothing_of_the_others(
    helm: Helm, kubectl: Kubectl, control_plane: ControlPlane, namespace: str, elsewhere: str
) -> None:
    operator_kubeconfig(control_plane, kubectl, helm, namespace=namespace, namespaces=[namespace])
    may = asking(kubectl, user_of(namespace))
    assert may("watch", "tenantpolicies.tidegate.io", namespace)
    assert may("list", "prioritytiers.tidegate.io")
    assert not may("list", "secrets", namespace)
    for resource in ("tenantpolicies.tidegate.io", "enginepools.tidegate.io", "pods"):
        assert not may("list", resource, elsewhere)


def test_operator_that_may_read_the_secrets_of_one_namespace_works_for_all(
    helm: Helm,
    kubectl: Kubectl,
    control_plane: ControlPlane,
    operator_setup: OperatorSetup,
    namespace: str,
    elsewhere: str,
    engines: list[ReportingEngine],
) -> None:
    kubeconfig = operator_kubeconfig(
        control_plane, kubectl, helm, namespace=namespace, apiKeyNamespaces=[namespace]
    )
    setup = replace(operator_setup, kubeconfig=kubeconfig, secret_namespaces=(namespace,))
    refs = [{"name": "keys", "key": "first"}]
    with running_operator(setup):
        apply(kubectl, namespace, a_policy("acme", apiKeySecretRefs=refs))
        apply(kubectl, elsewhere, a_key_secret("keys", first="theirs"))
        apply(kubectl, elsewhere, a_pool(), a_policy("acme", apiKeySecretRefs=refs))
        wait_for_conditions(kubectl, "tp", "acme", namespace, ResolvedRefs="SecretNotFound")
        for key in ("first-of-all", "rotated"):
            apply(kubectl, namespace, a_key_secret("keys", first=key))
            wait_until(lambda: [*engines[0].newest.tenant_by_key_digest] == [digest(key)])  # noqa: B023
        wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
        kubectl("delete", "secret", "keys", "-n", namespace, check=True)
        wait_until(lambda: engines[0].newest.tenant_by_key_digest == {})
        wait_for_conditions(kubectl, "tp", "acme", elsewhere, ResolvedRefs="SecretNotFound")


def digest(key: str) -> str:
    return str(key_digest(key.encode()))
