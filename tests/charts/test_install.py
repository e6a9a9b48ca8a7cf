"""Install, upgrade, roll back, uninstall: the real Helm on a real cluster whose pods really run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import RunningCluster, eventually
from tidegate_testing.fleet_load import ask
from tidegate_testing.helm import (
    CHART,
    CRD_CHART,
    Helm,
    Manifest,
    acl_rules,
    listed,
    written_commands,
)
from tidegate_testing.operator_process import a_key_secret, a_policy

pytestmark = pytest.mark.cluster

PREVIOUS = "0.0.9"
"""As the chart's version and its images' tag; the cluster's table knows both."""

NAMESPACE = "tidegate"
NUM_POLICIES = 97
KEY = "swordfish"
STREAM_TOKENS = 80
"""A stream takes about a second, less than engines drain for."""

HAND_OVER_SECONDS = 15.0
WAIT = ("--wait", "--timeout=4m")
VALUES: dict[str, Any] = {
    "operator": {"apiKeyNamespaces": [NAMESPACE]},
    "redis": {"enabled": False},
    "externalRedis": {
        "operatorUrl": {"secretName": "redis-operator"},
        "engineUrl": {"secretName": "redis-engine"},
    },
    "enginePools": [
        {
            "name": "chat",
            "replicas": 1,
            "drainSeconds": 3,
            "preStopSeconds": 1,
            # Its tokens are bytes: there is no tokenizer to load.
            "model": "",
            "env": {"TIDEGATE_EXECUTOR": "simulated", "TIDEGATE_SERVED_MODEL_NAME": "bytes"},
        }
    ],
}


class Administrator:
    """Types the commands of docs/install.md, in a folder like a checkout.

    Attributes:
        folder: Has the charts as `charts`.
    """

    def __init__(self, cluster: RunningCluster, helm: Helm, folder: Path) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        (programs / "helm").symlink_to(helm.path)
        (programs / "kubectl").symlink_to(cluster.cluster.kubectl.path)
        self._environment = helm.environment | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.kubeconfig),
        }

    def follow(self, section: str) -> None:
        """Do what the section says; each command must succeed."""
        for command in written_commands(section):
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"


@pytest.fixture
def administrator(
    assets: Assets, full_cluster: RunningCluster, previous: Path, tmp_path: Path
) -> Administrator:
    helm = Helm(assets.tool("helm"), tmp_path / "helm")
    return Administrator(full_cluster, helm, previous)


@contextmanager
def external_redis(
    helm: Helm, assets: Assets, cluster: RunningCluster, folder: Path
) -> Iterator[None]:
    """Run a Redis beside the cluster, with the chart's users; their URLs are in two Secrets.

    Pods have no cluster DNS here, so they can't find the chart's own by its name.
    """
    words = {user: uuid.uuid4().hex for user in ("operator", "engine")}
    hashes = {user: hashlib.sha256(word.encode()).hexdigest() for user, word in words.items()}
    users = acl_rules(helm.render(), hashes)
    with RedisServer(folder, assets, addresses=[cluster.host_address], users=users) as server:
        for user, word in words.items():
            url = server.url_for(username=user, password=word)
            cluster.kubectl(
                *("create", "secret", "generic", f"redis-{user}", "-n", NAMESPACE),
                f"--from-literal=url={url}",
            )
        yield


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


class Release:
    """What can be seen of the release."""

    def __init__(self, cluster: RunningCluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace

    def get(self, *what: str) -> list[Manifest]:
        """Return objects of the namespace."""
        shown = self._cluster.kubectl("get", *what, "-n", self._namespace, "-o", "json").stdout
        items: list[Manifest] = json.loads(shown)["items"]
        return items

    def identities(self) -> dict[str, tuple[str, int]]:
        """Return uid and generation of the users' objects."""
        return {
            one["metadata"]["name"]: (one["metadata"]["uid"], one["metadata"]["generation"])
            for one in self.get("tp,slo,ppol,epool")
        }

    def credentials(self) -> dict[str, Any]:
        """Return the Secrets that the Job has made."""
        label = "app.kubernetes.io/component=credentials"
        return {one["metadata"]["name"]: one["data"] for one in self.get("secret", "-l", label)}

    def revision(self) -> int:
        """Return the newest revision of the pool's policy."""
        (pool,) = self.get("epool")
        return int(pool["status"]["policy"]["revision"])

    def images(self) -> set[str]:
        """Return the images of the pods that are not on their way out."""
        return {
            pod["spec"]["containers"][0]["image"]
            for pod in self.get("pod")
            if "deletionTimestamp" not in pod["metadata"]
        }

    def pods(self, component: str) -> set[str]:
        """Return the names of a component's pods, those on their way out included."""
        label = f"app.kubernetes.io/component={component}"
        return {pod["metadata"]["name"] for pod in self.get("pod", "-l", label)}

    def wait_until_all_is_in_force(self) -> None:
        """Wait until every policy is enforced by every engine."""

        def unready() -> list[str]:
            return [
                one["metadata"]["name"]
                for one in self.get("tp,epool")
                if not any(
                    condition["type"] == "Ready"
                    and condition["status"] == "True"
                    and condition["observedGeneration"] == one["metadata"]["generation"]
                    for condition in one.get("status", {}).get("conditions", ())
                )
            ]

        eventually(lambda: not unready(), "every policy is in force", timeout_seconds=90)

    def answer(self) -> int:
        """Ask an engine through the Service, as a tenant does; returns the status."""
        address = self._cluster.address(self._namespace, "tidegate-engine-chat")
        body = {"model": "bytes", "prompt": "tides", "max_tokens": 2}
        request = urllib.request.Request(
            f"http://{address}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)


@contextmanager
def clients(cluster: RunningCluster) -> Iterator[list[str]]:
    """Ask engines and operators through their Services, all the time until the block ends.

    Yields:
        What failed, to be looked at after the block.
    """
    engines = f"http://{cluster.address(NAMESPACE, 'tidegate-engine-chat')}"
    operators = f"http://{cluster.address(NAMESPACE, 'tidegate-operator', 'metrics')}/metrics"
    failed: list[str] = []
    ended = threading.Event()

    def keep_asking(try_once: Callable[[], str]) -> int:
        count = 0
        while not ended.is_set():
            count += 1
            failed.extend(filter(None, [try_once()]))
        return count

    def stream() -> str:
        return ask(engines, KEY, model="bytes", num_tokens=STREAM_TOKENS)

    def scrape() -> str:
        try:
            status = httpx.get(operators, timeout=10).status_code
        except httpx.TransportError as error:
            return repr(error)
        return "" if status == httpx.codes.OK else f"metrics: {status}"

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(keep_asking, one) for one in (stream, stream, stream, scrape)]
        try:
            yield failed
        finally:
            ended.set()
        assert all(one.result() for one in asking)


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
    administrator.follow("Prepare")
    (administrator.folder / "values.yaml").write_text(json.dumps(VALUES))
    with external_redis(helm, assets, full_cluster, tmp_path / "redis"):
        administrator.follow("Install")
        assert release.images() == images(PREVIOUS)
        full_cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", input=listed(stored_objects()))
        release.wait_until_all_is_in_force()
        assert release.answer() == 200
        before, credentials = release.identities(), release.credentials()
        assert len(before) == NUM_POLICIES + 3
        assert set(credentials) == {"tidegate-operator", "tidegate-engine", "tidegate-redis"}
        revision = release.revision()

        shutil.rmtree(administrator.folder / "charts")
        (administrator.folder / "charts").symlink_to(CHART.parent)
        for section, version in (("Upgrade", "0.1.0"), ("Roll back", PREVIOUS)):
            with clients(full_cluster) as failed:
                administrator.follow(section)
                assert release.images() == images(version)
            assert failed == []
            release.wait_until_all_is_in_force()
            assert release.answer() == 200
            assert (release.identities(), release.credentials()) == (before, credentials)
            assert release.revision() == revision
        with clients(full_cluster) as failed:
            operators_are_replaced_while_policies_change(full_cluster, release)
        assert failed == []

        # Ends with the namespace and the definitions: nothing may wait for a finalizer.
        administrator.follow("Uninstall")
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
