"""Install, upgrade, roll back, uninstall: the real Helm on a real cluster whose pods really run."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_testing.cluster import RunningCluster, eventually
from tidegate_testing.helm import CHART, CRD_CHART, Helm, Manifest, listed, written_commands
from tidegate_testing.operator_process import a_key_secret, a_policy
from tidegate_testing.release import (
    KEY,
    NAMESPACE,
    VALUES,
    Administrator,
    Release,
    clients,
    external_redis,
    scrapes,
    streams,
)

pytestmark = pytest.mark.cluster

PREVIOUS = "0.0.9"
"""As the chart's version and its images' tag; the cluster's table knows both."""

NUM_POLICIES = 97
HAND_OVER_SECONDS = 15.0
WAIT = ("--wait", "--timeout=4m")


@pytest.fixture
def administrator(
    assets: Assets, full_cluster: RunningCluster, previous: Path, tmp_path: Path
) -> Administrator:
    helm = Helm(assets.tool("helm"), tmp_path / "helm")
    return Administrator(full_cluster, helm, previous)


@pytest.fixture
def previous(tmp_path: Path) -> Path:
    """A checkout whose charts are as if they had been released before."""
    folder = tmp_path / "checkout"
    for path in (CHART, CRD_CHART):
        copied = folder / "charts" / path.name
        shutil.copytree(path, copied)
        chart = (copied / "Chart.yaml").read_text()
        (copied / "Chart.yaml").write_text(chart.replace("ersion: 0.1.0", f"ersion: {PREVIOUS}"))
    return folder


def images(version: str) -> set[str]:
    return {f"tidegate/{part}:{version}" for part in ("operator", "engine")}


def stored_objects() -> list[Manifest]:
    """A hundred objects of all namespaced kinds but the pool's, which is the chart's."""
    policies = [a_policy(f"tenant-{number}", weight=number + 1) for number in range(NUM_POLICIES)]
    refs = [{"name": "keys", "key": "key"}]
    policies[0] = a_policy("tenant-0", apiKeySecretRefs=refs, serviceLevelRef={"name": "fast"})
    others = [("PreemptionPolicy", "gentle"), ("ServiceLevel", "fast")]
    named = [
        {
            "apiVersion": "tidegate.io/v1alpha1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {},
        }
        for kind, name in others
    ]
    return [*policies, *named, a_key_secret("keys", key=KEY)]


def operators_are_replaced_while_policies_change(cluster: RunningCluster, release: Release) -> None:
    """Each change must be in force in time, whoever leads."""
    rollout = ("rollout", "restart", "deploy/tidegate-operator", "-n", NAMESPACE)
    old = release.pods("operator")
    cluster.kubectl(*rollout)
    weight = 1000
    while old & release.pods("operator"):
        weight += 1
        changed = a_policy("tenant-1", weight=weight)
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=listed([changed]))
        began = time.monotonic()
        release.wait_until_all_is_in_force()
        assert time.monotonic() - began < HAND_OVER_SECONDS
    assert weight > 1001


def test_release_is_installed_upgraded_rolled_back_and_removed_and_no_policy_is_lost(
    helm: Helm,
    assets: Assets,
    full_cluster: RunningCluster,
    administrator: Administrator,
    tmp_path: Path,
) -> None:
    release = Release(full_cluster, NAMESPACE)
    administrator.follow(written_commands("Prepare"))
    (administrator.folder / "values.yaml").write_text(json.dumps(VALUES))
    with external_redis(helm, assets, full_cluster, tmp_path / "redis"):
        administrator.follow(written_commands("Install"))
        assert release.images() == images(PREVIOUS)
        full_cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=listed(stored_objects()))
        release.wait_until_all_is_in_force()
        assert release.answer() == 200
        shown = f"{NAMESPACE}/chat"
        eventually(lambda: shown in release.console()[1], "the pool in the console")
        assert release.console()[0] == httpx.codes.UNAUTHORIZED
        before, credentials = release.identities(), release.credentials()
        assert len(before) == NUM_POLICIES + 3
        assert set(credentials) == {"tidegate-operator", "tidegate-engine", "tidegate-redis"}
        revision = release.revision()

        shutil.rmtree(administrator.folder / "charts")
        (administrator.folder / "charts").symlink_to(CHART.parent)
        users = (*[streams(full_cluster)] * 3, scrapes(full_cluster))
        for section, version in (("Upgrade", "0.1.0"), ("Roll back", PREVIOUS)):
            with clients(*users) as failed:
                administrator.follow(written_commands(section))
                assert release.images() == images(version)
            assert failed == []
            release.wait_until_all_is_in_force()
            assert release.answer() == 200
            assert (release.identities(), release.credentials()) == (before, credentials)
            assert release.revision() == revision
        with clients(*users) as failed:
            operators_are_replaced_while_policies_change(full_cluster, release)
        assert failed == []

        # Ends with the namespace and the definitions: nothing may wait for a finalizer.
        administrator.follow(written_commands("Uninstall"))
    assert "tidegate.io" not in full_cluster.kubectl("get", "crd").stdout


def test_redis_of_the_chart_runs_and_knows_the_passwords_that_were_made(
    assets: Assets, full_cluster: RunningCluster, tmp_path: Path
) -> None:
    helm = Helm(assets.tool("helm"), tmp_path / "helm", full_cluster.kubeconfig)
    restricted = full_cluster.fresh_namespace()
    label = "pod-security.kubernetes.io/enforce=restricted"
    full_cluster.kubectl("label", "namespace", restricted, label)
    values = {"operator": {"replicas": 0}}
    helm("install", "own", str(CHART), f"--namespace={restricted}", *WAIT, values=values)
    release = Release(full_cluster, restricted)
    (pod,) = release.get("pod")
    secret = release.credentials()["own-tidegate-engine"]
    assert pod["status"]["containerStatuses"][0]["ready"]
    code = (
        "import redis, os, base64\n"
        f"engine = redis.Redis(host={pod['status']['podIP']!r}, username='engine',"
        f" password=base64.b64decode({secret['redis-password']!r}).decode())\n"
        "print(engine.ping())\n"
        "try: engine.hset('tidegate:a/b:policy', 'envelope', 'forged')\n"
        "except redis.exceptions.NoPermissionError: print('refused')\n"
    )
    full_cluster.kubectl(
        *("run", "caller", "--image=python", "--restart=Never", "-n", "default", "--", "-c", code)
    )
    full_cluster.kubectl(
        *("wait", "pod/caller", "--for=jsonpath={.status.phase}=Succeeded"),
        *("-n", "default", "--timeout=60s"),
    )
    assert full_cluster.log("default", "caller", "caller") == "True\nrefused\n"
    full_cluster.kubectl("delete", "pod", "caller", "-n", "default")
    helm("uninstall", "own", f"--namespace={restricted}", *WAIT)
    kinds = "deploy,pod,svc,sa,role,rolebinding,lease,job,pdb,netpol"
    of_release = ("-l", "app.kubernetes.io/instance=own")
    # Helm waits for what it made; the pods of its Deployments take their grace.
    eventually(lambda: not release.get(kinds, *of_release), "the end of the release")
    assert len(release.credentials()) == 3
    full_cluster.kubectl("delete", "namespace", restricted, "--wait=false")
