"""The whole development cluster as one context."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal

from tidegate_devcluster import progress
from tidegate_devcluster.api import KubernetesApi
from tidegate_devcluster.assets import CLUSTER_TOOL_NAMES, Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.errors import ApiError, DevClusterError, NetworkError
from tidegate_devcluster.kubectl import Kubectl
from tidegate_devcluster.kubelet import Allocatable, ProcessKubelet
from tidegate_devcluster.network import BridgeNetwork, LoopbackNetwork, PodNetwork
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.progress import Progress
from tidegate_devcluster.redis_server import LOOPBACK, RedisServer
from tidegate_devcluster.service_proxy import ServiceProxy
from tidegate_devcluster.tcp import forwarded

NetworkChoice = Literal["auto", "bridge", "loopback"]
POLL_SECONDS = 0.1
NOT_FOUND = 404
READY_SECONDS = 60.0


class DevCluster:
    """Control plane, process kubelet, service proxy and Redis; an async context manager.

    When entered, the node takes pods in the namespace `default`. When exited, also by an error,
    or when this process is killed, no process, namespace, bridge or temporary folder is left; a
    `root` that was given stays, with its logs.

    Attributes:
        root: Logs are under `root/logs` (control plane), `root/kubelet/logs` (pods) and
            `root/redis`.
        kubeconfig: Of an administrator.
        kubectl: The real one, as administrator.
        control_plane: The API server and what belongs to it.
        kubelet: The one node.
        proxy: Loopback ports of Services.
        redis: Listens on loopback and on the kubelet's `host_address`.
    """

    root: Path
    kubeconfig: Path
    kubectl: Kubectl
    control_plane: ControlPlane
    kubelet: ProcessKubelet
    proxy: ServiceProxy
    redis: RedisServer

    def __init__(
        self,
        *,
        images: Mapping[str, Sequence[str]],
        root: Path | None = None,
        assets: Assets | None = None,
        progress: Progress = progress.to_stderr,
        network: NetworkChoice = "auto",
        allocatable: Allocatable | None = None,
        redis_users: Sequence[str] = (),
        lifeline: Lifeline | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            images: Command line by image name; no other image runs.
            root: Folder of data and logs; a temporary one without.
            assets: Gives the binaries; by the environment without.
            progress: Told what is being done.
            network: "bridge" fails where namespaces aren't allowed, "auto" says so and takes
                loopback.
            allocatable: What the scheduler may give away on the node.
            redis_users: ACL rules, see RedisServer.
            lifeline: Removes all when this process is killed; one of its own without.
        """
        self._images = images
        self._given_root = root
        self._progress = progress
        self._assets = assets or Assets.from_environment(progress)
        self._network_choice = network
        self._allocatable = allocatable
        self._redis_users = redis_users
        self._given_lifeline = lifeline
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> DevCluster:
        async with AsyncExitStack() as exits:
            await self._start(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    def pod_kubeconfig(self, name: str, groups: Sequence[str] = ()) -> Path:
        """Writes a kubeconfig of a user that works from pods and from this machine alike."""
        return self.control_plane.user_kubeconfig(name, groups, host=self.kubelet.host_address)

    def raise_if_ended(self) -> None:
        """Complains about an end that nobody asked for.

        Raises:
            StartError: A process of the control plane or Redis has ended.
        """
        for child in (*self.control_plane.children, self.redis.child):
            child.raise_if_ended()

    async def _start(self, exits: AsyncExitStack) -> None:
        await _in_thread_to_the_end(self._prepare_tools, on_cancel=self._assets.give_up)
        self.root = self._given_root or Path(
            exits.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-devcluster-"))
        )
        lifeline = self._given_lifeline or exits.enter_context(Lifeline())
        if self._given_root is None:
            lifeline.remove_at_end(self.root)
        network = self._open_network(lifeline)
        exits.callback(network.close)
        self._progress("cluster: starting the control plane and Redis")
        await _in_thread_to_the_end(lambda: self._start_servers(exits, network, lifeline))
        if network.host_address != LOOPBACK:
            port = self.control_plane.port
            await exits.enter_async_context(
                forwarded((network.host_address, port), (LOOPBACK, port))
            )
        self.kubelet = await exits.enter_async_context(
            ProcessKubelet(
                self.root / "kubelet",
                self.kubeconfig,
                self._images,
                network=network,
                lifeline=lifeline,
                allocatable=self._allocatable,
                progress=self._progress,
            )
        )
        self.proxy = await exits.enter_async_context(
            ServiceProxy(self.kubeconfig, resolve=self.kubelet.endpoint)
        )
        self._progress("cluster: waiting until the node takes pods")
        await self._wait_until_usable()
        self._progress(f"cluster: ready, kubeconfig {self.kubeconfig}")

    def _prepare_tools(self) -> None:
        for name in CLUSTER_TOOL_NAMES:
            self._assets.tool(name)

    def _open_network(self, lifeline: Lifeline) -> PodNetwork:
        if self._network_choice == "loopback":
            return LoopbackNetwork()
        try:
            return BridgeNetwork(lifeline)
        except NetworkError as error:
            if self._network_choice == "bridge":
                raise
            self._progress(f"cluster: pods share this machine's loopback ({error})")
            return LoopbackNetwork()

    def _start_servers(
        self, exits: AsyncExitStack, network: PodNetwork, lifeline: Lifeline
    ) -> None:
        addresses = list(dict.fromkeys([LOOPBACK, network.host_address]))
        with ExitStack() as started:
            self.redis = started.enter_context(
                RedisServer(
                    self.root / "redis",
                    self._assets,
                    addresses=addresses,
                    users=self._redis_users,
                    lifeline=lifeline,
                )
            )
            self.control_plane = started.enter_context(
                ControlPlane(
                    self.root,
                    self._assets,
                    controllers=True,
                    hosts=[network.host_address],
                    lifeline=lifeline,
                )
            )
            exits.push(started.pop_all())
        self.kubeconfig = self.control_plane.kubeconfig
        self.kubectl = Kubectl(
            self._assets.tool("kubectl"), self.kubeconfig, self.root / "kubectl-cache"
        )

    async def _wait_until_usable(self) -> None:
        """A pod is refused before the default service account exists, and waits for the node."""
        async with KubernetesApi(self.kubeconfig) as api:

            async def has_account() -> bool:
                try:
                    await api.get("/api/v1/namespaces/default/serviceaccounts/default")
                except ApiError as error:
                    if error.status == NOT_FOUND:
                        return False
                    raise
                return True

            async def is_untainted() -> bool:
                node = await api.get(f"/api/v1/nodes/{self.kubelet.node_name}")
                return not node["spec"].get("taints")

            await _until(has_account, "the default service account")
            await _until(is_untainted, "the node without taints")


async def _in_thread_to_the_end(
    work: Callable[[], None], *, on_cancel: Callable[[], None] | None = None
) -> None:
    """Lets the thread finish even when cancelled: what it starts must be known to be stopped."""
    working = asyncio.create_task(asyncio.to_thread(work))
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        # Whatever it fails with now is of no interest.
        await asyncio.gather(working, return_exceptions=True)
        raise


async def _until(is_so: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not await is_so():
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise DevClusterError(f"{what} did not come within {READY_SECONDS:g} s") from None
