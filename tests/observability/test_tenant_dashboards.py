"""The operator gives each tenant a dashboard of its own, where it is told to."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tidegate_testing.operator_process import apply, wait_for_conditions, wait_until

pytestmark = pytest.mark.cluster

NAMESPACE = "team-gold"


def config_maps(watched: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the tenants' ConfigMaps, as Grafana's sidecar finds them."""
    where = ("-n", NAMESPACE, "-l", "grafana_dashboard=1", "-o", "json")
    listed = json.loads(watched.kubectl("get", "configmaps", *where, check=True).stdout)
    return {item["metadata"]["name"]: item for item in listed["items"]}


BOTH = {"tidegate-dashboard-gold", "tidegate-dashboard-batch"}


def test_each_tenant_gets_a_dashboard_that_shows_data(watched: Any) -> None:  # noqa: ANN401
    wait_until(lambda: set(config_maps(watched)) >= BOTH)
    policy = json.loads(
        watched.kubectl("get", "tp", "gold", "-n", NAMESPACE, "-o", "json", check=True).stdout
    )
    found = config_maps(watched)["tidegate-dashboard-gold"]
    assert found["metadata"]["annotations"]["grafana_folder"] == NAMESPACE
    (owner,) = found["metadata"]["ownerReferences"]
    assert owner["uid"] == policy["metadata"]["uid"]
    (text,) = found["data"].values()
    dashboard = json.loads(text)
    (tenant,) = (v["query"] for v in dashboard["templating"]["list"] if v["name"] == "tenant")
    assert tenant == f"{NAMESPACE}/gold"
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            variables = {"pool": ".*", "tenant": tenant}
            assert watched.data(target["expr"], variables), panel["title"]


def requests(watched: Any, *verbs: str) -> float:  # noqa: ANN401
    """Count what the API server was asked about ConfigMaps."""
    text = watched.kubectl("get", "--raw", "/metrics", check=True).stdout
    lines = re.findall(r"^apiserver_request_total\{(.*)\} (\S+)$", text, re.MULTILINE)
    return sum(
        float(value)
        for labels, value in lines
        if 'resource="configmaps"' in labels and any(f'verb="{verb}"' in labels for verb in verbs)
    )


def test_what_is_deleted_comes_back(watched: Any) -> None:  # noqa: ANN401
    wait_until(lambda: set(config_maps(watched)) >= BOTH)
    uid = config_maps(watched)["tidegate-dashboard-batch"]["metadata"]["uid"]
    watched.kubectl("delete", "configmap", "tidegate-dashboard-batch", "-n", NAMESPACE, check=True)
    wait_until(lambda: set(config_maps(watched)) >= BOTH)
    assert config_maps(watched)["tidegate-dashboard-batch"]["metadata"]["uid"] != uid


def test_what_is_settled_is_not_written(watched: Any) -> None:  # noqa: ANN401
    wait_until(lambda: set(config_maps(watched)) >= BOTH)
    written, listed = requests(watched, "APPLY", "PATCH"), requests(watched, "LIST")
    assert written >= len(BOTH)
    wait_until(lambda: requests(watched, "LIST") >= listed + 2)
    assert requests(watched, "APPLY", "PATCH") == written


def test_who_claims_anothers_tenant_gets_no_dashboard_of_it(watched: Any) -> None:  # noqa: ANN401
    thief = {
        "apiVersion": "tidegate.io/v1alpha1",
        "kind": "TenantPolicy",
        "metadata": {"name": "thief"},
        "spec": {"poolRefs": [{"name": "chat"}], "tenant": f"{NAMESPACE}/gold"},
    }
    apply(watched.kubectl, NAMESPACE, thief)
    wait_for_conditions(watched.kubectl, "tp", "thief", NAMESPACE, Accepted="TenantConflict")
    # Written after it would have been: the operator has looked at all policies since.
    watched.kubectl("delete", "configmap", "tidegate-dashboard-batch", "-n", NAMESPACE, check=True)
    wait_until(lambda: set(config_maps(watched)) >= BOTH)
    assert "tidegate-dashboard-thief" not in config_maps(watched)


def test_the_operator_may_write_its_own_config_maps_alone(
    watched: Any,  # noqa: ANN401
    operator_account: str,
) -> None:
    def create(name: str, *options: str) -> str:
        done = watched.kubectl(
            *("create", "configmap", name, "-n", NAMESPACE),
            *options,
            *(f"--as={operator_account}",),
        )
        return str(done.stderr)

    wait_until(lambda: "no ConfigMap but those of dashboards" in create("settings"))
    assert "that it hasn't made" in create("tidegate-dashboard-none")
    watched.kubectl(
        "create", "configmap", "tidegate-dashboard-foreign", "-n", NAMESPACE, check=True
    )
    label = '{"metadata": {"labels": {"tidegate.io/tenant-dashboard": "true"}}}'
    patched = watched.kubectl(
        *("patch", "configmap", "tidegate-dashboard-foreign", "-n", NAMESPACE, "-p", label),
        f"--as={operator_account}",
    )
    assert patched.returncode != 0
    for verb in ("get", "delete"):
        asked = ("auth", "can-i", verb, "configmaps", "-n", NAMESPACE, f"--as={operator_account}")
        assert watched.kubectl(*asked).stdout.strip() == "no"
