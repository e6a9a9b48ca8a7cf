"""The chart's ValidatingAdmissionPolicy, enforced by a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.cluster import eventually
from tidegate_testing.helm import Helm, listed
from tidegate_testing.operator_process import Manifest, a_policy

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

TIERS = [{"name": "premium", "namespaceLabels": {"tidegate.io/premium": "true"}}]
POOLS = [
    {"namespace": "serving", "name": "chat", "namespaceLabels": {"team": "a", "stage": "prod"}}
]


@pytest.fixture(scope="module", autouse=True)
def policy(helm: Helm, kubectl: Kubectl, crds_installed: None) -> Iterator[None]:  # noqa: ARG001
    values = {"admissionPolicy": {"tiers": TIERS, "pools": POOLS}}
    rendered = [o for o in helm.render(values=values) if "AdmissionPolicy" in o["kind"]]
    assert len(rendered) == 2
    kubectl("apply", "-f", "-", input=listed(rendered), check=True)
    probe = json.dumps(a_policy("probe", priorityTier="premium"))
    create = ("create", "--dry-run=server", "-n", "default", "-f", "-")
    # The API server takes some seconds to know a new one.
    eventually(lambda: kubectl(*create, input=probe).returncode != 0, "the policy is enforced")
    yield
    kubectl("delete", "-f", "-", input=listed(rendered), check=True)


def label(kubectl: Kubectl, namespace: str, *labels: str) -> None:
    kubectl("label", "namespace", namespace, *labels, check=True)


def refusal(kubectl: Kubectl, namespace: str, manifest: Manifest) -> str:
    """Return why the API server doesn't take it; nothing where it does."""
    return kubectl("apply", "-n", namespace, "-f", "-", input=json.dumps(manifest)).stderr


def test_tier_is_for_namespaces_with_its_label(kubectl: Kubectl, namespace: str) -> None:
    premium = a_policy("acme", priorityTier="premium")
    assert (
        "tier premium is only for namespaces labelled tidegate.io/premium=true, and"
        f" {namespace} is not" in refusal(kubectl, namespace, premium)
    )
    label(kubectl, namespace, "tidegate.io/premium=false")
    assert "tier premium" in refusal(kubectl, namespace, premium)
    label(kubectl, namespace, "tidegate.io/premium=true", "--overwrite")
    assert refusal(kubectl, namespace, premium) == ""


def test_tier_can_not_be_had_by_the_way_of_requests_either(
    kubectl: Kubectl, namespace: str
) -> None:
    sly = a_policy("sly", priorityTier="standard", allowedTiers=["background", "premium"])
    assert "tier premium" in refusal(kubectl, namespace, sly)


def test_pool_is_for_namespaces_with_all_its_labels(kubectl: Kubectl, namespace: str) -> None:
    policy = a_policy("acme", poolRefs=[{"name": "own"}, {"name": "chat", "namespace": "serving"}])
    label(kubectl, namespace, "team=a")
    assert "pool serving/chat is only for namespaces labelled stage=prod,team=a" in refusal(
        kubectl, namespace, policy
    )
    label(kubectl, namespace, "stage=prod")
    assert refusal(kubectl, namespace, policy) == ""


def test_change_is_judged_like_a_new_object_and_the_rest_is_nobodys_business(
    kubectl: Kubectl, namespace: str
) -> None:
    assert refusal(kubectl, namespace, a_policy("acme")) == ""
    assert refusal(kubectl, namespace, a_policy("acme", priorityTier="standard")) == ""
    changed = a_policy("acme", priorityTier="premium")
    assert "tier premium" in refusal(kubectl, namespace, changed)
    tier = {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "PriorityTier",
        "metadata": {"name": "premium"},
        "spec": {"value": 1},
    }
    assert refusal(kubectl, namespace, tier) == ""
    kubectl("delete", "ptier", "premium", check=True)
