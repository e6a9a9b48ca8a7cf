"""Tidegate whole on this machine: control plane, Redis, operator, engines, sample policies.

What `tidegate up`, `tidegate demo` and the benchmarks run on. Everything is real; only the pods are
local processes. Leaving the context stops every process and removes every file.
"""

import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import aiohttp

from tidegate_cli.catalog import policies_folder
from tidegate_cli.conditions import ResourceWatch
from tidegate_cli.engine_metrics import EngineMetrics
from tidegate_cli.errors import KubectlError, NotReadyError
from tidegate_cli.guard import guarded
from tidegate_cli.operator_child import OperatorChild
from tidegate_cli.rollout import pods_ready
from tidegate_cli.workload import EngineWorkload, Object, key_secret, namespace_object, new_key
from tidegate_devcluster.api import KubernetesApi
from tidegate_devcluster.cluster import DevCluster
from tidegate_devcluster.processes import Lifeline
from tidegate_operator.crds import crd_files
from tidegate_operator.keys import generate_signing_key, public_key_text

_T = TypeVar("_T")

Progress = Callable[[str], None]
"""Takes one line that says what is being done."""

ENGINE_IMAGE = "tidegate/engine"
TENANTS = ("gold", "silver", "batch")
POOL = "chat"
DEFINED_SECONDS = 30.0
POLL_SECONDS = 0.1
START_SECONDS = 180.0
"""For the engines to load their model and get their first policy, on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """What is started.

    Attributes:
        executor: `torch` runs SmolLM2-135M; `simulated` takes its time and computes nothing.
        kv_blocks: KV blocks per engine.
        max_num_seqs: Requests that one engine runs at a time.
        engine_environment: More variables for the engines, by name.
        policies: Name of a ready-made set of policies, with `tiers.yaml`, `pool.yaml` and
            `tenants.yaml`.
    """

    executor: Literal["torch", "simulated"] = "torch"
    replicas: int = 2
    kv_blocks: int = 512
    max_num_seqs: int = 16
    engine_environment: Mapping[str, str] | None = None
    namespace: str = "demo"
    policies: str = "gold-silver-batch"


class LocalTidegate:
    """A running Tidegate; an async context manager, entered when every policy is Programmed.

    Attributes:
        namespace: Of pool, policies and engines.
        keys: API key by tenant.
        cluster: The control plane and what runs its pods.
        operator: Its process.
        model: Name of the model that the engines serve.
        work_folder: Logs and data; removed at the end unless starting failed.
    """

    cluster: DevCluster
    operator: OperatorChild
    model: str
    work_folder: Path

    def __init__(
        self, settings: LocalSettings | None = None, *, progress: Progress | None = None
    ) -> None:
        self.settings = settings or LocalSettings()
        self.namespace = self.settings.namespace
        self.keys: dict[str, str] = {tenant: new_key(tenant) for tenant in TENANTS}
        self._tell = progress or (lambda _line: None)
        self._engine_token = secrets.token_urlsafe(32)
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.work_folder = Path(tempfile.mkdtemp(prefix="tidegate-"))
        async with AsyncExitStack() as exits:
            self._lifeline = exits.enter_context(Lifeline())
            self._lifeline.remove_at_end(self.work_folder)
            exits.push(self._keep_logs_of_failure)
            await self._start(exits)
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tell("stopping everything")
        await self._exits.__aexit__(kind, error, trace)

    async def guarded(self, work: Awaitable[_T]) -> _T:
        """Do the work, but give it up as soon as a process ends that it depends on.

        Raises:
            StartError: The operator, a process of the control plane or Redis ended unasked.
        """
        return await guarded(work, self._raise_if_ended)

    @property
    def base_url(self) -> str:
        """The OpenAI-compatible API, in front of all engines; ends in `/v1`."""
        return f"http://{self.cluster.proxy.address(self.namespace, 'engine')}/v1"

    @property
    def policies(self) -> Path:
        """Folder of the applied set of policies."""
        return policies_folder(self.settings.policies)

    async def kubectl(self, *arguments: str, input: str | None = None) -> str:  # noqa: A002 - as in subprocess.run
        """Run the real kubectl, in the demo namespace unless `arguments` name another.

        Returns:
            What it printed to standard output.

        Raises:
            KubectlError: It failed.
        """
        done = await asyncio.to_thread(
            self.cluster.kubectl, f"--namespace={self.namespace}", *arguments, input=input
        )
        if done.returncode != 0:
            raise KubectlError(arguments, done.returncode, done.stderr)
        return done.stdout

    async def get(self, *arguments: str) -> dict[str, Any]:
        """Return what `kubectl get` gives as JSON."""
        found: dict[str, Any] = json.loads(await self.kubectl("get", "-o", "json", *arguments))
        return found

    async def apply(self, objects: Sequence[Object]) -> None:
        """Apply objects with kubectl."""
        listing = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        await self.kubectl("apply", "-f", "-", input=json.dumps(listing))

    async def start_operator(self) -> None:
        """Start the operator if it doesn't run."""
        await self.operator.start()

    async def stop_operator(self, *, kill: bool = False) -> None:
        """Stop the operator, or kill it as a crash would."""
        await self.operator.stop(kill=kill)

    async def restart_operator(self, *, kill: bool = False) -> None:
        """Stop and start the operator."""
        await self.operator.stop(kill=kill)
        await self.operator.start()

    async def engine_urls(self) -> dict[str, str]:
        """Return where this machine reaches each engine pod, by pod name, without the service."""
        pods = await self.get("pods", "--selector=app=engine")
        urls = {}
        for pod in pods["items"]:
            if ip := pod["status"].get("podIP"):
                host, port = self.cluster.kubelet.endpoint(ip, self._workload.port)
                urls[pod["metadata"]["name"]] = f"http://{host}:{port}"
        return urls

    async def engine_metrics(self) -> dict[str, EngineMetrics]:
        """Return the metrics of each engine pod, by pod name.

        Raises:
            NotReadyError: An engine doesn't answer.
        """
        found = {}
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:
            for pod, url in (await self.engine_urls()).items():
                try:
                    async with session.get(f"{url}/metrics") as response:
                        found[pod] = EngineMetrics(await response.text())
                except (aiohttp.ClientError, TimeoutError) as error:
                    raise NotReadyError(
                        f"metrics of pod {pod}", limit_seconds=10, last_seen=str(error)
                    ) from error
        return found

    def watch(self, plural: str) -> ResourceWatch:
        """Return a watch on one kind of custom resource in the namespace; enter it to begin."""
        return ResourceWatch(self.cluster.kubeconfig, namespace=self.namespace, plural=plural)

    async def _start(self, exits: AsyncExitStack) -> None:
        began = time.monotonic()

        def tell(line: str) -> None:
            self._tell(f"[{time.monotonic() - began:6.1f} s] {line}")

        # In a real cluster engines don't share cores with the control plane; here they yield.
        engine = ("nice", "-n", "10", sys.executable, "-m", "tidegate_engine")
        self.cluster = await exits.enter_async_context(
            DevCluster(
                root=self.work_folder / "cluster",
                images={ENGINE_IMAGE: engine},
                progress=tell,
                lifeline=self._lifeline,
            )
        )
        tell("control plane, kubelet, proxy and Redis are ready")
        await self.kubectl(
            "apply", "--server-side", "-f", "-", input="---\n".join(crd_files().values())
        )
        await self._kinds_served()
        tell("custom resources are defined")
        await self._start_operator_child(exits)
        await self.guarded(self._deploy(tell))

    async def _deploy(self, tell: Progress) -> None:
        await self._apply_all()
        tell("operator started; engines and policies applied")
        async with self.watch("enginepools") as pools, self.watch("tenantpolicies") as policies:
            async with KubernetesApi(self.cluster.kubeconfig) as api:
                await pods_ready(
                    api, self.namespace, "engine", limit_seconds=START_SECONDS, tell=tell
                )
            await pools.when_true(POOL, "Programmed", generation=1, limit_seconds=30)
            for tenant in TENANTS:
                await policies.when_true(tenant, "Programmed", generation=1, limit_seconds=30)
        self.model = await self._served_model()
        tell(f"every policy is Programmed in every engine; the model is {self.model}")

    async def _kinds_served(self) -> None:
        """Wait until the API server serves the kinds.

        Not by `kubectl wait`: it fails on an object that has no conditions yet.
        """
        try:
            async with asyncio.timeout(DEFINED_SECONDS):
                while not all(map(_is_established, (await self.get("crd"))["items"])):
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise NotReadyError(
                "custom resource definitions", limit_seconds=DEFINED_SECONDS, last_seen="refused"
            ) from None

    async def operator_kubeconfig(self) -> Path:
        """Return that of the user whom the operator works as: here who may do everything."""
        return self.cluster.kubeconfig

    async def _start_operator_child(self, exits: AsyncExitStack) -> None:
        signing_key_file = self.work_folder / "signing-key.pem"
        self._verify_key = public_key_text(generate_signing_key(signing_key_file))
        engine_token_file = self.work_folder / "engine-token"
        engine_token_file.write_text(self._engine_token)
        self.operator = OperatorChild(
            kubeconfig=await self.operator_kubeconfig(),
            redis_url=self.cluster.redis.url,
            signing_key_file=signing_key_file,
            engine_token_file=engine_token_file,
            log=self.work_folder / "operator.log",
            lifeline=self._lifeline,
            hosts=[self.cluster.kubelet.host_address],
        )
        # At the end nothing is worth the seconds that a graceful stop takes.
        exits.push_async_callback(self.operator.stop, kill=True)
        await self.operator.start()

    async def _apply_all(self) -> None:
        await self.apply([namespace_object(self.namespace)])
        # Pods are refused before it exists, and the Deployment would back off.
        await self.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=30s")
        secrets = [key_secret(self.namespace, tenant, key) for tenant, key in self.keys.items()]
        await self.apply([*secrets, *self._workload.objects()])
        for name in ("tiers.yaml", "pool.yaml", "tenants.yaml"):
            await self.kubectl("apply", "-f", str(self.policies / name))

    @property
    def _workload(self) -> EngineWorkload:
        redis_url = self.cluster.redis.url_for(address=self.cluster.kubelet.host_address)
        return EngineWorkload(
            namespace=self.namespace,
            image=ENGINE_IMAGE,
            replicas=self.settings.replicas,
            environment={
                "TIDEGATE_POOL": f"{self.namespace}/{POOL}",
                "TIDEGATE_REDIS_URL": redis_url,
                "TIDEGATE_VERIFY_KEY": self._verify_key,
                "TIDEGATE_ADMIN_TOKEN": self._engine_token,
                "TIDEGATE_EXECUTOR": self.settings.executor,
                "TIDEGATE_KV_BLOCKS": str(self.settings.kv_blocks),
                "TIDEGATE_MAX_NUM_SEQS": str(self.settings.max_num_seqs),
                # All engines share this machine's cores: none may count them as its own.
                "TIDEGATE_THREADS": "1",
                # Shorter than the pod's grace, so that engines end by themselves.
                "TIDEGATE_DRAIN_SECONDS": "5",
                "TIDEGATE_STATE_DIR": f"{self.work_folder}/engines/$(TIDEGATE_POD_NAME)",
                **(self.settings.engine_environment or {}),
            },
        )

    async def _served_model(self) -> str:
        headers = {"Authorization": f"Bearer {self.keys['gold']}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{self.base_url}/models", raise_for_status=True) as response,
        ):
            listing = await response.json()
        return str(listing["data"][0]["id"])

    def _raise_if_ended(self) -> None:
        self.operator.raise_if_ended()
        self.cluster.raise_if_ended()

    def _keep_logs_of_failure(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,  # noqa: ARG002 - as of every exit
        trace: TracebackType | None,  # noqa: ARG002
    ) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._lifeline.keep(self.work_folder)
            self._tell(f"logs are kept in {self.work_folder}")


def _is_established(definition: Object) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)
