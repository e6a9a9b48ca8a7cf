"""docs/install.md and the examples against the charts; test_install.py runs the commands."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tidegate_devcluster.kubectl import Kubectl
from tidegate_testing import keda
from tidegate_testing.helm import CHART, INSTALL_PAGE, Helm, acl_rules, pod_specs

pytestmark = pytest.mark.cluster

FENCED = re.findall(r"^```yaml\n(.*?)^```$", INSTALL_PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", FENCED)
def test_values_in_the_page_are_taken_by_the_chart(helm: Helm, text: str) -> None:
    values = yaml.safe_load(text)
    assert helm.render(values=values) != helm.render()


def test_users_of_an_external_redis_are_those_of_the_charts_own(helm: Helm) -> None:
    written = re.findall(r"^user (\w+ on >PASSWORD .*)$", INSTALL_PAGE.read_text(), re.MULTILINE)
    rendered = [
        re.sub(r"#\$\(\w+\)", ">PASSWORD", rules)
        for rules in acl_rules(helm.render(), {})
        if not rules.startswith("default")
    ]
    assert written == rendered


def test_secrets_in_the_page_are_those_that_the_pods_read(helm: Helm) -> None:
    rows = re.findall(r"^\| `(tidegate-\w+)` \| (.*?) \|", INSTALL_PAGE.read_text(), re.MULTILINE)
    written = {(name, key) for name, keys in rows for key in re.findall(r"`([\w-]+)`", keys)}
    read: set[tuple[str, str]] = set()
    values = {"enginePools": [{"name": "chat"}], "operator": {"console": {"enabled": True}}}
    for spec in pod_specs(helm.render(values=values)).values():
        for entry in (one for each in spec["containers"] for one in each.get("env", ())):
            source: dict[str, Any] = entry.get("valueFrom", {}).get("secretKeyRef", {})
            if source:
                read.add((source["name"], source["key"]))
        for volume in spec.get("volumes", ()):
            secret = volume.get("secret", {})
            read |= {(secret["secretName"], item["key"]) for item in secret.get("items", ())}
    assert read == written


def test_examples_scale_what_the_chart_makes(helm: Helm, kubectl: Kubectl) -> None:
    objects = helm.render(values={"enginePools": [{"name": "chat", "replicas": None}]})
    pool = next(one for one in objects if one["kind"] == "EnginePool")
    # Without it a pool has no scale.
    assert pool["spec"]["workloadRef"]["kind"] == "Deployment"
    for path in sorted((CHART / "examples").glob("*.yaml")):
        example = yaml.safe_load(path.read_text())
        assert example["spec"]["scaleTargetRef"] == {
            "apiVersion": pool["apiVersion"],
            "kind": pool["kind"],
            "name": pool["metadata"]["name"],
        }
    kubectl("create", "namespace", "tidegate")
    dry_run = ("apply", "--server-side", "--dry-run=server", "-f", str(CHART / "examples"))
    with keda.installed(kubectl, keda.OLDEST):
        kubectl(*dry_run, check=True)
