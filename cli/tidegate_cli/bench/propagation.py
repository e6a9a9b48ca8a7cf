"""`tidegate bench propagation`: from a change in the API to Programmed=True, and what it costs.

Real control plane, Redis, operator and engine pods; the engines compute nothing (`simulated`),
because a policy takes effect between steps whatever a step is made of. Times are taken in this
process, between a request to the API server and the event of a watch: no kubectl start-up in them.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from kubernetes.aio import client
from kubernetes.aio.config import load_kube_config
from rich.console import Console

from tidegate_cli import report
from tidegate_cli.bench.result import BenchResult
from tidegate_cli.conditions import ResourceWatch
from tidegate_cli.errors import NotReadyError
from tidegate_cli.local import POOL, TENANTS, LocalSettings, LocalTidegate
from tidegate_cli.percentiles import percentile
from tidegate_operator.resources import API_VERSION, GROUP, VERSION

_PLURAL = "tenantpolicies"
_WRITES_AT_ONCE = 16
_CHANGE_SECONDS = 30.0
_SETTLE_SECONDS = 60.0
_QUIET_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class PropagationSettings:
    """How much is measured.

    Attributes:
        policies: TenantPolicies of the pool; a burst changes each of them once.
        changes: Changes one by one, each after the one before is Programmed.
        idle_seconds: How long writes are counted while nothing changes.
        kubectl_rounds: Changes with the real kubectl, for comparison.
    """

    policies: int = 50
    engines: int = 2
    changes: int = 50
    idle_seconds: float = 60.0
    kubectl_rounds: int = 5
    seed: int = 1

    def quick(self) -> "PropagationSettings":
        """Return the same with fewer changes and a shorter idle time."""
        return replace(self, changes=min(self.changes, 10), idle_seconds=5.0, kubectl_rounds=1)


class PolicyWriter:
    """Changes weights of TenantPolicies through one connection pool."""

    def __init__(self, api: client.CustomObjectsApi, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self._weight = 100

    @classmethod
    @asynccontextmanager
    async def connected(cls, kubeconfig: Path, namespace: str) -> AsyncIterator["PolicyWriter"]:
        """Open connections for the length of the block."""
        # Never by a proxy of the environment: the address is this machine's.
        configuration = client.Configuration(client_session_kwargs={"trust_env": False})
        await load_kube_config(  # type: ignore[no-untyped-call]
            str(kubeconfig), client_configuration=configuration
        )
        async with client.ApiClient(configuration) as api:
            yield cls(client.CustomObjectsApi(api), namespace)

    async def create(self, name: str) -> None:
        """Create a policy without keys."""
        body = {
            "apiVersion": API_VERSION,
            "kind": "TenantPolicy",
            "metadata": {"name": name},
            "spec": {"poolRefs": [{"name": POOL}], "weight": 100},
        }
        await self._api.create_namespaced_custom_object(
            GROUP, VERSION, self._namespace, _PLURAL, body
        )

    async def change(self, name: str) -> int:
        """Give a policy a weight that none had before; returns the new generation."""
        self._weight += 1
        changed: Any = await self._api.patch_namespaced_custom_object(
            GROUP,
            VERSION,
            self._namespace,
            _PLURAL,
            name,
            {"spec": {"weight": self._weight}},
            _content_type="application/merge-patch+json",
        )
        return int(changed["metadata"]["generation"])


class PropagationBench:
    """One run on a running Tidegate."""

    def __init__(
        self,
        tidegate: LocalTidegate,
        settings: PropagationSettings,
        *,
        writer: PolicyWriter,
        watch: ResourceWatch,
        others: tuple[ResourceWatch, ...],
        progress: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            tidegate: With simulated engines.
            settings: How much.
            writer: Makes the changes.
            watch: Of the TenantPolicies.
            others: Of the other kinds that the operator writes to.
            progress: Told what is measured.
        """
        self._tidegate = tidegate
        self._settings = settings
        self._writer = writer
        self._watch = watch
        self._others = others
        self._tell = progress
        self._rng = random.Random(settings.seed)
        more = max(0, settings.policies - len(TENANTS))
        self._added = [f"tenant-{number:05d}" for number in range(more)]
        self._names = [*TENANTS, *self._added]
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> BenchResult:
        """Measure everything.

        Raises:
            NotReadyError: A change didn't become Programmed in time.
        """
        await self._add_policies()
        one_by_one = [await self._one_change() for _ in range(self._settings.changes)]
        self._tell(f"{self._settings.changes} changes one by one: done")
        burst = await self._burst()
        self._tell(f"a burst of {len(self._names)} changes: done")
        kubectl = [await self._kubectl_change() for _ in range(self._settings.kubectl_rounds)]
        writes_per_minute = await self._idle_writes()
        pid = self._tidegate.operator.pid
        rss = psutil.Process(pid).memory_info().rss / 1e6 if pid else 0.0
        restart = await self._restart()
        return BenchResult(
            bench="propagation",
            settings={
                "policies": len(self._names),
                "engines": self._settings.engines,
                "changes": self._settings.changes,
                "idle_seconds": self._settings.idle_seconds,
                "seed": self._settings.seed,
                "executor": "simulated",
            },
            results={
                "p50_ms": percentile(one_by_one, 50) or 0.0,
                "p99_ms": percentile(one_by_one, 99) or 0.0,
                "burst_p99_ms": percentile(burst, 99) or 0.0,
                "operator_rss_mb": rss,
                "idle_writes_per_min": writes_per_minute,
                "restart_s": restart,
            },
            series={
                "apply_to_programmed_ms": one_by_one,
                "burst_ms": burst,
                "kubectl_apply_and_wait_ms": kubectl,
            },
        )

    async def _add_policies(self) -> None:
        slots = asyncio.Semaphore(_WRITES_AT_ONCE)

        async def create(name: str) -> None:
            async with slots:
                await self._writer.create(name)

        await asyncio.gather(*(create(name) for name in self._added))
        for name in self._names:
            await self._programmed(name, 1, limit_seconds=_SETTLE_SECONDS)
        self._tell(f"{len(self._names)} policies are Programmed in every engine")

    async def _programmed(
        self, name: str, generation: int, *, limit_seconds: float = _CHANGE_SECONDS
    ) -> float:
        return await self._watch.when_true(
            name, "Programmed", generation=generation, limit_seconds=limit_seconds
        )

    async def _one_change(self) -> float:
        name = self._rng.choice(self._names)
        began = self._clock()
        generation = await self._writer.change(name)
        return (await self._programmed(name, generation) - began) * 1000

    async def _burst(self) -> list[float]:
        """Change all policies at once; times count from the API server's last answer."""
        slots = asyncio.Semaphore(_WRITES_AT_ONCE)

        async def change(name: str) -> int:
            async with slots:
                return await self._writer.change(name)

        generations = await asyncio.gather(*(change(name) for name in self._names))
        answered = self._clock()
        return [
            max(0.0, await self._programmed(name, generation) - answered) * 1000
            for name, generation in zip(self._names, generations, strict=True)
        ]

    async def _kubectl_change(self) -> float:
        """Change a policy as people do: kubectl, its start-up included, then `kubectl wait`."""
        name = self._rng.choice(self._names)
        item = await self._tidegate.get("tenantpolicy", name)
        weight = item["spec"]["weight"] + 1
        began = self._clock()
        patch = f'{{"spec": {{"weight": {weight}}}}}'
        await self._tidegate.kubectl("patch", "tenantpolicy", name, "--type=merge", "-p", patch)
        await self._tidegate.kubectl(
            "wait", f"tenantpolicy/{name}", "--for=condition=Programmed", "--timeout=30s"
        )
        return (self._clock() - began) * 1000

    async def _idle_writes(self) -> float:
        await self._quiet()
        self._tell(f"counting writes while nothing changes, {self._settings.idle_seconds:g} s")
        before = self._num_writes()
        await asyncio.sleep(self._settings.idle_seconds)
        return (self._num_writes() - before) * 60 / self._settings.idle_seconds

    async def _quiet(self) -> None:
        """Wait until nothing was written for a while: the changes' own writes are no idle ones."""
        deadline = self._clock() + _SETTLE_SECONDS
        seen = -1
        while seen != self._num_writes():
            if self._clock() > deadline:
                raise NotReadyError("no more writes to status", limit_seconds=_SETTLE_SECONDS)
            seen = self._num_writes()
            await asyncio.sleep(_QUIET_SECONDS)

    def _num_writes(self) -> int:
        return sum(watch.num_writes for watch in (self._watch, *self._others))

    async def _restart(self) -> float:
        """Kill the operator, change a policy meanwhile, and time from its start to Programmed."""
        await self._tidegate.stop_operator(kill=True)
        name = self._rng.choice(self._names)
        generation = await self._writer.change(name)
        began = self._clock()
        await self._tidegate.start_operator()
        return await self._programmed(name, generation) - began


async def run_propagation(
    console: Console,
    *,
    settings: PropagationSettings,
    progress: Callable[[str], None],
    json_file: Path | None,
) -> None:
    """Start everything, measure, print a table, write the JSON file, stop everything.

    Raises:
        CommandError: Something didn't start, or a change didn't become Programmed in time.
        DevClusterError: The cluster didn't start.
    """
    local = LocalSettings(executor="simulated", replicas=settings.engines)
    async with AsyncExitStack() as exits:
        tidegate = await exits.enter_async_context(LocalTidegate(local, progress=progress))
        writer = await exits.enter_async_context(
            PolicyWriter.connected(tidegate.cluster.kubeconfig, tidegate.namespace)
        )
        watch, pools = [
            await exits.enter_async_context(tidegate.watch(plural))
            for plural in (_PLURAL, "enginepools")
        ]
        bench = PropagationBench(
            tidegate, settings, writer=writer, watch=watch, others=(pools,), progress=progress
        )
        result = await tidegate.guarded(bench.run())
        console.print(report.figures_table("bench propagation", result.results))
        kubectl = percentile(result.series["kubectl_apply_and_wait_ms"], 50) or 0.0
        console.print(
            f"with kubectl patch and kubectl wait, their start-up included: {kubectl:.0f} ms (p50)"
        )
        if json_file is not None:
            result.write(json_file)
