"""What is wrong with an object is gone as soon as its cause is, whoever has to change for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.operator_process import (
    Manifest,
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

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed", "operator")]

KEYS = [{"name": "keys", "key": "one"}]


@pytest.fixture(scope="module")
def operator(crds_installed: None, operator_setup: OperatorSetup) -> Iterator[None]:  # noqa: ARG001
    with running_operator(operator_setup):
        yield


def tenants(engine: ReportingEngine) -> set[str]:
    return set(engine.newest.tenant_rules)


@pytest.fixture
def other_namespace(kubectl: Kubectl, namespace: str) -> str:
    name = f"{namespace}-guests"
    kubectl("create", "namespace", name, check=True)
    return name


@pytest.mark.parametrize(
    ("reason", "spec"),
    [
        ("TenantConflict", {"tenant": "both"}),
        ("QuotaOversubscribed", {"kv": {"nominalPercent": 50}}),
        ("KeyConflict", {"apiKeySecretRefs": KEYS}),
    ],
)
@pytest.mark.usefixtures("engines")
def test_conflict_is_over_when_the_older_policy_goes(
    kubectl: Kubectl, namespace: str, reason: str, spec: Manifest
) -> None:
    apply(kubectl, namespace, a_key_secret("keys", one=f"{namespace}-{reason}"))
    apply(kubectl, namespace, a_policy("first", **spec))
    wait_for_conditions(kubectl, "tp", "first", namespace, Ready="Ready")
    apply(kubectl, namespace, a_policy("second", **spec))
    wait_for_conditions(kubectl, "tp", "second", namespace, Accepted=reason)
    kubectl("delete", "tp", "first", "-n", namespace, check=True)
    wait_for_conditions(kubectl, "tp", "second", namespace, Accepted="Accepted", Ready="Ready")


def test_namespace_is_let_into_a_pool_and_a_tier_as_long_as_it_has_the_label(
    kubectl: Kubectl, namespace: str, other_namespace: str, engines: list[ReportingEngine]
) -> None:
    allowed = {"from": "Selector", "selector": {"matchLabels": {"team": namespace}}}
    pool, tier = a_pool(), a_tier(f"gold-{namespace}", allowed)
    pool["spec"]["allowedNamespaces"] = allowed
    ref = [{"name": "chat", "namespace": namespace}]
    apply(kubectl, namespace, pool, tier)
    apply(
        kubectl,
        other_namespace,
        a_policy("guest", poolRefs=ref),
        a_policy("best", poolRefs=ref, priorityTier=tier["metadata"]["name"]),
    )
    guests = {f"{other_namespace}/guest", f"{other_namespace}/best"}

    def all_are(reason: str) -> None:
        for name in ("guest", "best"):
            wait_for_conditions(kubectl, "tp", name, other_namespace, Ready=reason)

    all_are("NamespaceNotAllowed")
    kubectl("label", "namespace", other_namespace, f"team={namespace}", check=True)
    all_are("Ready")
    assert tenants(engines[0]) == guests
    kubectl("label", "namespace", other_namespace, "team-", check=True)
    wait_until(lambda: not tenants(engines[0]))
    all_are("NamespaceNotAllowed")
    kubectl("delete", "ptier", tier["metadata"]["name"], check=True)


def a_tier(name: str, allowed: Manifest) -> Manifest:
    return {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "PriorityTier",
        "metadata": {"name": name},
        "spec": {"allowedNamespaces": allowed},
    }


def test_key_that_a_secret_lacks_is_named_and_taken_once_it_is_there(
    kubectl: Kubectl, namespace: str, engines: list[ReportingEngine]
) -> None:
    apply(kubectl, namespace, a_key_secret("keys", other="swordfish"))
    apply(kubectl, namespace, a_policy("acme", apiKeySecretRefs=KEYS))
    found = wait_for_conditions(
        kubectl, "tp", "acme", namespace, ResolvedRefs="SecretKeyNotFound", Programmed="Programmed"
    )
    messages = [one["message"] for one in found["status"]["conditions"]]
    assert any("'one'" in message and "'keys'" in message for message in messages), messages
    assert engines[0].newest.tenant_by_key_digest == {}
    apply(kubectl, namespace, a_key_secret("keys", one="swordfish"))
    wait_for_conditions(kubectl, "tp", "acme", namespace, Ready="Ready")
    # A Secret has no part in the policy's generation: engines may still be taking its key.
    wait_until(lambda: [*engines[0].newest.tenant_by_key_digest.values()] == [f"{namespace}/acme"])
