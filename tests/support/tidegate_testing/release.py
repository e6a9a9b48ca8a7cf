"""A release of the charts on a cluster whose pods really run, and who uses it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import RunningCluster, eventually
from tidegate_testing.fleet_load import ask
from tidegate_testing.helm import Helm, Manifest, acl_rules

NAMESPACE = "tidegate"
KEY = "swordfish"
STREAM_TOKENS = 80
"""A stream takes about a second, less than engines drain for."""

VALUES: dict[str, Any] = {
    "operator": {"apiKeyNamespaces": [NAMESPACE], "console": {"enabled": True}},
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
    """Types the commands of a page, in a folder like a checkout.

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

    def follow(self, commands: Sequence[str]) -> None:
        """Do what a page says; each command must succeed."""
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"


@contextmanager
def external_redis(
    helm: Helm, assets: Assets, cluster: RunningCluster, folder: Path
) -> Iterator[RedisServer]:
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
        yield server


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

    def console(self) -> tuple[int, str]:
        """Ask the console for its page without a token, and with the one that was made.

        Returns:
            The status without it, and the page with it.
        """
        url = f"http://{self._cluster.address(self._namespace, 'tidegate-console')}/"
        (made,) = (own for name, own in self.credentials().items() if name.endswith("-operator"))
        token = base64.b64decode(made["console-token"]).decode()
        with httpx.Client(follow_redirects=True, timeout=30) as visitor:
            try:
                refused = visitor.get(url)
            except httpx.TransportError as error:
                return 0, repr(error)
            return refused.status_code, visitor.get(url, params={"token": token}).text


def streams(cluster: RunningCluster) -> Callable[[], str]:
    """Return what asks an engine through the Service for an answer; it returns what failed."""
    engines = f"http://{cluster.address(NAMESPACE, 'tidegate-engine-chat')}"
    return lambda: ask(engines, KEY, model="bytes", num_tokens=STREAM_TOKENS)


def scrapes(cluster: RunningCluster) -> Callable[[], str]:
    """Return what asks an operator through the Service for its metrics; it returns what failed."""
    operators = f"http://{cluster.address(NAMESPACE, 'tidegate-operator', 'metrics')}/metrics"

    def scrape() -> str:
        try:
            status = httpx.get(operators, timeout=10).status_code
        except httpx.TransportError as error:
            return repr(error)
        return "" if status == httpx.codes.OK else f"metrics: {status}"

    return scrape


@contextmanager
def clients(*asks: Callable[[], str]) -> Iterator[list[str]]:
    """Ask, each time anew, all the time until the block ends.

    Yields:
        What failed, to be looked at after the block.
    """
    failed: list[str] = []
    ended = threading.Event()

    def keep_asking(try_once: Callable[[], str]) -> int:
        count = 0
        while not ended.is_set():
            count += 1
            failed.extend(filter(None, [try_once()]))
        return count

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(keep_asking, one) for one in asks]
        try:
            yield failed
        finally:
            ended.set()
        assert all(one.result() for one in asking)
