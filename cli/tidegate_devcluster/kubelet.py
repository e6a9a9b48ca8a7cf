"""A kubelet that runs pods as processes of this machine.

What it has: Node and Lease; pods by `spec.nodeName`, each in a place of a PodNetwork; `command`,
`args`, `env`, `envFrom`; httpGet and tcpSocket probes; the usual volumes, where pods have
namespaces; restarts with back-off; status; graceful deletion, `preStop.sleep` included; a log file
per container. What it lacks, it names in the container's waiting state: init containers, other
volumes, hooks and probes. It limits neither processor nor memory, everything runs as this process's
user, and pods see this machine's files.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import aiohttp

from tidegate_devcluster import progress
from tidegate_devcluster.api import Change, Json, KubernetesApi, Listing
from tidegate_devcluster.container import timestamp
from tidegate_devcluster.errors import ApiError
from tidegate_devcluster.network import PodNetwork
from tidegate_devcluster.pod import Node, Pod
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.progress import Progress

NODE_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
LEASE_SECONDS = 40
RENEW_SECONDS = 10.0
RETRY_SECONDS = 0.2
CONFLICT = 409


@dataclass(frozen=True)
class Allocatable:
    """What the scheduler may give away on the node; numbers alone, nothing enforces them."""

    cpu: str = "64"
    memory: str = "256Gi"
    pods: int = 110
    extended: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> Json:
        """Returns the node's status.allocatable."""
        own = {"cpu": self.cpu, "memory": self.memory, "pods": str(self.pods)}
        return {**own, **dict(self.extended)}


class ProcessKubelet:
    """One node and the processes of its pods; an async context manager.

    The Node is registered when entered; no process and no namespace is left when exited, and the
    objects in the API stay.

    Attributes:
        host_address: By this address pods reach what listens on this machine.
    """

    host_address: str

    def __init__(
        self,
        root: Path,
        kubeconfig: Path,
        images: Mapping[str, Sequence[str]],
        *,
        network: PodNetwork,
        lifeline: Lifeline,
        node_name: str = "devcluster",
        allocatable: Allocatable | None = None,
        progress: Progress = progress.to_stderr,
    ) -> None:
        """Keeps logs under `root/logs`.

        Args:
            root: Folder of its own.
            kubeconfig: Of an administrator.
            images: Command line by image name, what an image's entry point would be.
            network: Where pods live.
            lifeline: Kills the pods' processes when this one is killed.
            node_name: Also the node's host name label.
            allocatable: What the scheduler may give away.
            progress: Told what the API refuses of a pod's status.
        """
        self.host_address = network.host_address
        self.node_name = node_name
        self._root = root
        self._kubeconfig = kubeconfig
        self._images = dict(images)
        self._network = network
        self._lifeline = lifeline
        self._allocatable = allocatable or Allocatable()
        self._progress = progress
        self._pods: dict[str, Pod] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> ProcessKubelet:
        async with AsyncExitStack() as exits:
            self._api = await exits.enter_async_context(KubernetesApi(self._kubeconfig))
            session = await exits.enter_async_context(aiohttp.ClientSession())
            self._node = Node(
                name=self.node_name,
                root=self._root,
                images=self._images,
                environment={
                    "PATH": os.environ.get("PATH", os.defpath),
                    # The API server, as every pod finds it.
                    "KUBERNETES_SERVICE_HOST": self.host_address,
                    "KUBERNETES_SERVICE_PORT": str(self._api.port),
                },
                api=self._api,
                network=self._network,
                lifeline=self._lifeline,
                session=session,
                tell=self._progress,
            )
            await self._register()
            exits.push_async_callback(self._stop_pods)
            for work in (self._keep_alive(), self._follow_pods()):
                exits.push_async_callback(_end, asyncio.create_task(work))
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    def endpoint(self, ip: str, port: int) -> tuple[str, int]:
        """Returns where this machine reaches the port of a pod's address."""
        for pod in self._pods.values():
            if pod.place is not None and pod.place.ip == ip:
                return pod.place.endpoint(port)
        return ip, port

    def log(self, namespace: str, pod: str, container: str) -> Path:
        """Returns the log file of a container; it exists once the container was started."""
        return self._root / "logs" / namespace / pod / f"{container}.log"

    async def _register(self) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.node_name,
                "labels": {
                    "kubernetes.io/hostname": self.node_name,
                    "kubernetes.io/os": platform.system().lower(),
                },
            },
        }
        try:
            await self._api.create("/api/v1/nodes", body)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        await self._write_node_status()

    async def _write_node_status(self) -> None:
        condition = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "the process kubelet is running",
            "lastHeartbeatTime": timestamp(),
        }
        status = {
            "capacity": self._allocatable.to_json(),
            "allocatable": self._allocatable.to_json(),
            "conditions": [condition],
            "nodeInfo": _node_info(),
            "addresses": [
                {"type": "InternalIP", "address": self.host_address},
                {"type": "Hostname", "address": self.node_name},
            ],
        }
        await self._api.patch(f"/api/v1/nodes/{self.node_name}/status", {"status": status})

    async def _keep_alive(self) -> None:
        while True:
            try:
                await self._renew_lease()
                await self._write_node_status()
            except (ApiError, aiohttp.ClientError, TimeoutError):
                # The namespace of leases appears a moment after the first start.
                await asyncio.sleep(RETRY_SECONDS)
            else:
                await asyncio.sleep(RENEW_SECONDS)

    async def _renew_lease(self) -> None:
        spec = {
            "holderIdentity": self.node_name,
            "leaseDurationSeconds": LEASE_SECONDS,
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.node_name},
            "spec": spec,
        }
        try:
            await self._api.create(NODE_LEASES, lease)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await self._api.patch(f"{NODE_LEASES}/{self.node_name}", {"spec": spec})

    async def _follow_pods(self) -> None:
        own = {"fieldSelector": f"spec.nodeName={self.node_name}"}
        async for news in self._api.follow("/api/v1/pods", own):
            if isinstance(news, Listing):
                self._take_all(news)
            else:
                self._take(news)

    def _take_all(self, listing: Listing) -> None:
        present = {pod["metadata"]["uid"] for pod in listing.items}
        for uid, pod in self._pods.items():
            if uid not in present:
                pod.abandon()
        for item in listing.items:
            self._take(Change(item, is_gone=False))

    def _take(self, change: Change) -> None:
        uid = change.item["metadata"]["uid"]
        known = self._pods.get(uid)
        if known is not None:
            if change.is_gone:
                known.abandon()
            else:
                known.update(change.item)
        elif not change.is_gone and _is_to_run(change.item):
            pod = self._pods[uid] = Pod(change.item, self._node)
            run = self._runs[uid] = asyncio.create_task(pod.run())
            run.add_done_callback(lambda _: self._forget(uid))

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        run = self._runs.pop(uid)
        if not run.cancelled():
            # A failure here is a fault of the kubelet: the event loop reports it.
            run.result()

    async def _stop_pods(self) -> None:
        runs = list(self._runs.values())
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)


def _node_info() -> Json:
    known = {
        "kernelVersion": platform.release(),
        "osImage": platform.platform(),
        "operatingSystem": platform.system().lower(),
        "architecture": platform.machine(),
        "containerRuntimeVersion": "process://1",
        "kubeletVersion": "process",
    }
    # The API wants every field, also where there is nothing to say.
    unknown = ("machineID", "systemUUID", "bootID", "kubeProxyVersion")
    return {**dict.fromkeys(unknown, ""), **known}


def _is_to_run(pod: Json) -> bool:
    """A pod that has ended keeps its status, and nothing of it runs again."""
    return pod.get("status", {}).get("phase") not in {"Succeeded", "Failed"}


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
