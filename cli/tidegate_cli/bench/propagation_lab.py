"""What `bench propagation` runs on: API server, Redis and operator, all real, and many engines."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml

from tidegate_cli.bench.propagation_crowd import Crowd
from tidegate_cli.bench.propagation_engines import EnginesSettings
from tidegate_cli.conditions import ResourceWatch
from tidegate_cli.engine_metrics import EngineMetrics
from tidegate_cli.errors import NotReadyError
from tidegate_cli.operator_child import OperatorChild
from tidegate_cli.workload import Object, key_secret, namespace_object
from tidegate_devcluster.api import KubernetesApi
from tidegate_devcluster.assets import Assets
from tidegate_devcluster.control_plane import ControlPlane
from tidegate_devcluster.processes import Lifeline
from tidegate_devcluster.redis_server import RedisServer
from tidegate_operator.cluster import ClusterView
from tidegate_operator.crds import crd_files
from tidegate_operator.keys import generate_signing_key, public_key_text
from tidegate_operator.kube import WATCHED
from tidegate_operator.resources import API_VERSION, GROUP, VERSION
from tidegate_operator.watch_cache import WatchCache

NAMESPACE = "bench"
POOL = "chat"
FIRST_WEIGHT = 100

_WRITES_AT_ONCE = 16
_WRITING_VERBS = ("POST", "PUT", "PATCH", "APPLY", "DELETE", "DELETECOLLECTION")
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_MEMORY = Path("/dev/shm")
_SERVED_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Servers:
    """Control plane and Redis, running.

    Attributes:
        folder: For whatever else writes; removed at the end.
    """

    control_plane: ControlPlane
    redis: RedisServer
    folder: Path
    lifeline: Lifeline

    def raise_if_ended(self) -> None:
        """Complain about an end that nobody asked for.

        Raises:
            StartError: A process has ended.
        """
        for child in (*self.control_plane.children, self.redis.child):
            child.raise_if_ended()


class Objects:
    """The objects of the bench, made through one connection pool."""

    def __init__(self, api: KubernetesApi) -> None:
        self._api = api
        self._namespace = f"/api/v1/namespaces/{NAMESPACE}"
        self._custom = f"/apis/{GROUP}/{VERSION}"
        self._policies = f"{self._custom}/namespaces/{NAMESPACE}/tenantpolicies"
        self._weight = FIRST_WEIGHT

    async def create_all(self, *, tenants: Iterable[str], pods: Iterable[str]) -> None:
        """Create a pool with ready pods that nobody runs, and tenants with an API key each."""
        await self._define_kinds()
        await self._api.create("/api/v1/namespaces", namespace_object(NAMESPACE))
        tier = _custom("PriorityTier", "standard", {"value": 0, "globalDefault": True})
        await self._api.create(f"{self._custom}/prioritytiers", tier)
        pool = _custom("EnginePool", POOL, {"selector": {"matchLabels": {"app": "engine"}}})
        await self._api.create(f"{self._custom}/namespaces/{NAMESPACE}/enginepools", pool)
        await at_once(self._create_pod(pod) for pod in pods)
        await at_once(self._create_tenant(tenant) for tenant in tenants)

    async def change(self, policy: str) -> "Change":
        """Give a policy a weight that none had before."""
        self._weight += 1
        weight = self._weight
        body = {"spec": {"weight": weight}}
        changed = await self._api.merge(f"{self._policies}/{policy}", body)
        return Change(policy, weight, int(changed["metadata"]["generation"]))

    async def view(self) -> ClusterView:
        """Return all objects as an operator sees them."""
        cache = WatchCache()
        for watched in WATCHED:
            for raw in (await self._api.get(watched.path()))["items"]:
                cache.put(watched, raw)
        return cache.view()

    async def num_writes(self) -> float:
        """Count what the API server was asked to write so far, by whomever, without Leases."""
        lines = (await self._api.text("/metrics")).splitlines()
        requests = [line for line in lines if line.startswith("apiserver_request_total{")]
        counted = EngineMetrics("\n".join(requests) + "\n")
        total = 0.0
        for verb in _WRITING_VERBS:
            total += counted.value("apiserver_request_total", verb=verb)
            total -= counted.value("apiserver_request_total", verb=verb, resource="leases")
        return total

    async def _define_kinds(self) -> None:
        for text in crd_files().values():
            await self._api.create(_DEFINITIONS, yaml.safe_load(text))
        try:
            async with asyncio.timeout(_SERVED_SECONDS):
                while not all(map(_is_served, (await self._api.get(_DEFINITIONS))["items"])):
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise NotReadyError(
                "custom resource definitions", limit_seconds=_SERVED_SECONDS
            ) from None

    async def _create_pod(self, name: str) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": "engine"}},
            "spec": {"containers": [{"name": "engine", "image": "engine"}]},
        }
        await self._api.create(f"{self._namespace}/pods", pod)
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        await self._api.patch(f"{self._namespace}/pods/{name}/status", {"status": status})

    async def _create_tenant(self, name: str) -> None:
        secret = key_secret(NAMESPACE, name, secrets.token_urlsafe(18))
        await self._api.create(f"{self._namespace}/secrets", secret)
        spec = {
            "poolRefs": [{"name": POOL}],
            "weight": FIRST_WEIGHT,
            "apiKeySecretRefs": [{"name": secret["metadata"]["name"], "key": "key"}],
        }
        await self._api.create(self._policies, _custom("TenantPolicy", name, spec))


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a policy, as the API server has taken it."""

    policy: str
    weight: int
    generation: int

    @property
    def tenant(self) -> str:
        """Its tenant, as engines call it."""
        return f"{NAMESPACE}/{self.policy}"


@dataclass(frozen=True)
class Lab:
    """All parts, running.

    Attributes:
        policies: A watch of the TenantPolicies.
        pools: A watch of the EnginePools.
    """

    objects: Objects
    operator: OperatorChild
    crowd: Crowd
    policies: ResourceWatch
    pools: ResourceWatch
    servers: Servers

    @classmethod
    @asynccontextmanager
    async def running(
        cls, tenants: Iterable[str], pods: tuple[str, ...], tell: Callable[[str], None]
    ) -> AsyncIterator["Lab"]:
        """Start everything; the operator comes last, and finds all objects."""
        async with AsyncExitStack() as exits:
            servers = await asyncio.to_thread(_start_servers, exits)
            tell("API server and Redis are ready")
            api = await exits.enter_async_context(KubernetesApi(servers.control_plane.kubeconfig))
            objects = Objects(api)
            await objects.create_all(tenants=tenants, pods=pods)
            tell("pool, pods, Secrets and policies are created")
            signing_key_file = servers.folder / "signing-key.pem"
            settings = EnginesSettings(
                pool=f"{NAMESPACE}/{POOL}",
                pods=pods,
                redis_url=servers.redis.url,
                verify_key=public_key_text(generate_signing_key(signing_key_file)),
                state_dir=_state_folder(exits, servers.lifeline),
                observer=servers.folder / "observer",
            )
            crowd = await exits.enter_async_context(
                Crowd.running(settings, root=servers.folder, lifeline=servers.lifeline)
            )
            policies, pools = [
                await exits.enter_async_context(
                    ResourceWatch(
                        servers.control_plane.kubeconfig, namespace=NAMESPACE, plural=plural
                    )
                )
                for plural in ("tenantpolicies", "enginepools")
            ]
            operator = _operator(servers, signing_key_file)
            exits.push_async_callback(operator.stop, kill=True)
            await operator.start()
            tell("engines and operator are started")
            yield cls(objects, operator, crowd, policies, pools, servers)

    def raise_if_ended(self) -> None:
        """Complain about an end that nobody asked for.

        Raises:
            StartError: A process that everything depends on has ended.
        """
        self.operator.raise_if_ended()
        self.crowd.raise_if_ended()
        self.servers.raise_if_ended()

    @property
    def num_changes(self) -> int:
        """Changes of policies and pools that the watches have brought."""
        return self.policies.num_writes + self.pools.num_writes

    @property
    def changed_at(self) -> float:
        """When a watch brought the last of them, by the monotonic clock."""
        return max(self.policies.written_at, self.pools.written_at)

    def operator_cpu_seconds(self) -> float:
        """Return the processor time that the operator has taken since its start."""
        times = psutil.Process(self.operator.pid).cpu_times()
        return float(times.user + times.system)

    def operator_peak_megabytes(self) -> float:
        """Return the most memory that the operator has had resident since its start."""
        status = Path(f"/proc/{self.operator.pid}/status").read_text(encoding="ascii")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 1e6

    async def compiles(self) -> tuple[float, float]:
        """Return how often the operator has compiled, and the seconds that it took."""
        url = f"http://127.0.0.1:{self.operator.metrics_port}/metrics"
        async with (
            aiohttp.ClientSession(raise_for_status=True) as session,
            session.get(url) as answer,
        ):
            metrics = EngineMetrics(await answer.text())
        name = "tidegate_compile_seconds"
        return metrics.value(f"{name}_count"), metrics.value(f"{name}_sum")


async def at_once(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Do all of it, a bounded part of it at a time."""
    slots = asyncio.Semaphore(_WRITES_AT_ONCE)

    async def bounded(one: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401
        async with slots:
            return await one

    return await asyncio.gather(*map(bounded, work))


def _start_servers(exits: AsyncExitStack) -> Servers:
    with ExitStack() as started:
        lifeline = started.enter_context(Lifeline())
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-")))
        lifeline.remove_at_end(folder)
        assets = Assets.from_environment()
        redis = started.enter_context(RedisServer(folder / "redis", assets, lifeline=lifeline))
        control_plane = started.enter_context(
            ControlPlane(folder / "cluster", assets, controllers=False, lifeline=lifeline)
        )
        exits.push(started.pop_all())
    return Servers(control_plane, redis, folder, lifeline)


def _state_folder(exits: AsyncExitStack, lifeline: Lifeline) -> Path:
    """Return a folder in memory where there is one: elsewhere each engine has a disk of its own."""
    where = _MEMORY if _MEMORY.is_dir() else None
    folder = Path(
        exits.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-bench-", dir=where))
    )
    lifeline.remove_at_end(folder)
    return folder


def _operator(servers: Servers, signing_key_file: Path) -> OperatorChild:
    token = servers.folder / "engine-token"
    token.write_text(secrets.token_urlsafe(32))
    return OperatorChild(
        kubeconfig=servers.control_plane.kubeconfig,
        redis_url=servers.redis.url,
        signing_key_file=signing_key_file,
        engine_token_file=token,
        log=servers.folder / "operator.log",
        lifeline=servers.lifeline,
    )


def _is_served(definition: Object) -> bool:
    conditions = definition.get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _custom(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}
