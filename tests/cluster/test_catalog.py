"""Each ready-made set of policies, applied as its README says, is in force whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing.operator_process import (
    OperatorSetup,
    a_key_secret,
    apply,
    running_operator,
    wait_until,
)
from tidegate_testing.reporting_engine import ReportingEngine

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds_installed")]

CATALOG = Path(__file__).parents[2] / "policies" / "catalog"
SETS = sorted(path.name for path in CATALOG.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_taken_whole_and_every_object_of_it_is_ready(
    kubectl: Kubectl,
    namespace: str,
    operator_setup: OperatorSetup,
    engines: list[ReportingEngine],
    name: str,
) -> None:
    paths = sorted((CATALOG / name).glob("*.yaml"))
    written = [one for path in paths for one in yaml.safe_load_all(path.read_text())]
    policies = [one for one in written if one["kind"] == "TenantPolicy"]
    for policy in policies:
        for ref in policy["spec"]["apiKeySecretRefs"]:
            apply(kubectl, namespace, a_key_secret(ref["name"], **{ref["key"]: ref["name"]}))
    where = ("-n", namespace, "-f", str(CATALOG / name))
    kubectl("apply", *where, check=True)

    def not_ready() -> list[str]:
        found = kubectl("get", *where, "-o", "json", check=True).stdout
        return [
            f"{one['kind']}/{one['metadata']['name']}: {one.get('status')}"
            for one in json.loads(found)["items"]
            if not any(
                (condition["type"], condition["status"]) == ("Ready", "True")
                for condition in one.get("status", {}).get("conditions", ())
            )
        ]

    with running_operator(replace(operator_setup, namespaces=(namespace,))):
        wait_until(lambda: not not_ready(), context=not_ready)
        names = {f"{namespace}/{policy['metadata']['name']}" for policy in policies}
        assert set(engines[0].newest.tenant_rules) == names
        assert set(engines[0].newest.tenant_by_key_digest.values()) == names
        tiers = {policy["spec"].get("priorityTier") for policy in policies} - {None}
        assert tiers <= set(engines[0].newest.tier_values)
    kubectl("delete", *where, check=True)
