"""The commands of docs/disaster.md, as written, on a release that lost what they bring back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_testing.cluster import RunningCluster, eventually
from tidegate_testing.helm import (
    CHART,
    DISASTER_PAGE,
    Helm,
    Manifest,
    listed,
    written_commands,
)
from tidegate_testing.operator_process import a_key_secret, a_policy
from tidegate_testing.release import (
    KEY,
    NAMESPACE,
    VALUES,
    Administrator,
    Release,
    clients,
    external_redis,
    streams,
)

pytestmark = pytest.mark.cluster

KINDS = ("tenantpolicies", "enginepools", "prioritytiers", "servicelevels", "preemptionpolicies")


def some_objects() -> list[Manifest]:
    """Some of every kind but the pool's, which is the chart's."""
    refs = [{"name": "keys", "key": "key"}]
    holder = a_policy(
        "holder", apiKeySecretRefs=refs, priorityTier="gold", serviceLevelRef={"name": "fast"}
    )
    named = [
        {"apiVersion": "tidegate.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": {}}
        for kind, name in (
            ("PriorityTier", "gold"),
            ("PreemptionPolicy", "gentle"),
            ("ServiceLevel", "fast"),
        )
    ]
    policies = [a_policy(f"tenant-{number}", weight=number + 1) for number in range(5)]
    return [holder, *named, *policies, a_key_secret("keys", key=KEY)]


class Users:
    """What users have stored, and what engines make of it."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster

    def apply(self, *objects: Manifest) -> None:
        self._cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=listed(objects))

    def specs(self) -> dict[str, Any]:
        shown = self._cluster.kubectl("get", "tp,epool,ptier,slo,ppol", "-A", "-o", "json").stdout
        return {
            f"{one['kind']}/{one['metadata']['name']}": one["spec"]
            for one in json.loads(shown)["items"]
        }

    def revision_in_force(self) -> int:
        """Ask the engine itself."""
        address = self._cluster.address(NAMESPACE, "tidegate-engine-chat")
        text = httpx.get(f"http://{address}/metrics", timeout=10).text
        (line,) = [one for one in text.splitlines() if one.startswith("tidegate_policy_revision")]
        return int(float(line.rpartition(" ")[2]))

    def lose_the_operator(self, release: Release) -> None:
        self._cluster.kubectl(
            "scale", "deployment/tidegate-operator", "--replicas=0", "-n", NAMESPACE
        )
        eventually(lambda: not release.pods("operator"), "the operators' end", timeout_seconds=90)

    def lose_objects_and_secrets(self) -> None:
        self._cluster.kubectl("delete", "crd", *(f"{kind}.tidegate.io" for kind in KINDS))
        where = ("-n", NAMESPACE)
        label = "app.kubernetes.io/component=credentials"
        self._cluster.kubectl("delete", "secret", "keys", *where)
        self._cluster.kubectl("delete", "secret", "-l", label, *where)


@pytest.fixture
def administrator(assets: Assets, full_cluster: RunningCluster, tmp_path: Path) -> Administrator:
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "charts").symlink_to(CHART.parent)
    (folder / "values.yaml").write_text(json.dumps(VALUES))
    return Administrator(full_cluster, Helm(assets.tool("helm"), tmp_path / "helm"), folder)


@pytest.fixture
def do(administrator: Administrator) -> Callable[[str], None]:
    """Do what a section of the page says."""
    return lambda section: administrator.follow(written_commands(section, DISASTER_PAGE))


def test_what_was_lost_comes_back_and_engines_serve_all_the_time(
    helm: Helm,
    assets: Assets,
    full_cluster: RunningCluster,
    administrator: Administrator,
    do: Callable[[str], None],
    tmp_path: Path,
) -> None:
    release, users = Release(full_cluster, NAMESPACE), Users(full_cluster)
    administrator.follow(written_commands("Prepare"))
    with external_redis(helm, assets, full_cluster, tmp_path / "redis") as redis:
        administrator.follow(written_commands("Install"))
        users.apply(*some_objects())
        release.wait_until_all_is_in_force()
        engines, credentials = release.pods("engine"), release.credentials()
        do("See what is gone")

        with clients(*[streams(full_cluster)] * 2) as failed:
            users.lose_the_operator(release)
            users.apply(a_policy("tenant-1", weight=100))
            revision = users.revision_in_force()
            do("The operator is gone")
            release.wait_until_all_is_in_force()
            assert users.revision_in_force() == revision + 1

            do("Keep a copy")
            stored = users.specs()
            users.lose_the_operator(release)
            users.lose_objects_and_secrets()
            redis.restart()
            assert users.revision_in_force() == revision + 1
            do("The objects are gone")
            release.wait_until_all_is_in_force()
            assert users.specs() == stored
            restored = users.revision_in_force()
            assert restored > revision
            users.apply(a_policy("tenant-1", weight=200))
            release.wait_until_all_is_in_force()
            assert users.revision_in_force() == restored + 1
        assert failed == []
        assert (release.pods("engine"), release.credentials()) == (engines, credentials)
        administrator.follow(written_commands("Uninstall"))
