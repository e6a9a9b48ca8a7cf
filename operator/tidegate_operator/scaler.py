"""Carries out what a pool's `/scale` asks: reads workloads, drains victims, sets replicas."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import aiohttp

from tidegate_operator.cluster import DRAINING_ANNOTATION, PodView
from tidegate_operator.kube import PODS, WORKLOADS, ApiError, Watched
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.resources import EnginePool, WorkloadRef
from tidegate_operator.scaling import (
    SCALE_DOWN,
    ScalePlan,
    choose_victims,
    plan_scale,
    read_workload,
)
from tidegate_operator.verdicts import Flaw, Reason

_LOG = logging.getLogger(__name__)

REST_SECONDS = 5.0
"""How often it is looked who else scales a workload; what the pool asks for is seen at once."""

DRAIN_CHECK_SECONDS = 0.5

NOTICE_SECONDS = 15.0
"""An engine that was told to drain and is ready all the same is waited for no longer."""

COST_ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
VICTIM_COST = "-1000"
"""Other pods cost 0 unless somebody says otherwise: the ReplicaSet takes the victims first."""

_NOT_FOUND = 404
_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


class ScaleApi(Protocol):
    """Where workloads, pods and pools are."""

    async def read(self, watched: Watched, namespace: str, name: str) -> Any:  # noqa: ANN401
        """Return one object as JSON."""

    async def set_replicas(
        self, watched: Watched, namespace: str, name: str, replicas: int
    ) -> None:
        """Have a workload scaled."""

    async def give_replicas(self, namespace: str, pool: str, replicas: int) -> None:
        """Set the replicas of an EnginePool that still has none."""

    async def annotate(
        self, watched: Watched, namespace: str, name: str, annotations: Mapping[str, str | None]
    ) -> None:
        """Set annotations of an object; None removes one."""


class Scaler:
    """Makes the workload of every pool follow the pool's replicas."""

    def __init__(
        self, api: ScaleApi, pools: Pools, *, book: ReportBook, reporter: Reporter
    ) -> None:
        self._api = api
        self._pools = pools
        self._book = book
        self._reporter = reporter
        self._due: set[str] = set()
        self._wake = asyncio.Event()
        self._told_at: dict[str, float] = {}

    def look_at(self, keys: Iterable[str]) -> None:
        """Have these pools compared with their workloads soon."""
        self._due.update(keys)
        self._wake.set()

    async def run(self) -> None:
        """Scale until cancelled."""
        await self._reporter.hear_first()
        draining: set[str] = set()
        while True:
            try:
                async with asyncio.timeout(DRAIN_CHECK_SECONDS if draining else REST_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._due.update(draining or self._pools.records)
            self._wake.clear()
            due, self._due = self._due, set()
            for key in sorted(due):
                draining.discard(key)
                if await self._look(key):
                    draining.add(key)

    async def _look(self, key: str) -> bool:
        """Bring one pool forward; tell whether its engines are draining."""
        pool, record = self._pools.view.pools.get(key), self._pools.records.get(key)
        if pool is None or record is None:
            return False
        workload = pool.spec.workload_ref
        if workload is None:
            self._judge(key, record, flaws=(), missing=())
            return False
        try:
            return await self._scale(key, pool, record, workload)
        except _ERRORS as error:
            if isinstance(error, ApiError) and error.status == _NOT_FOUND:
                self._judge(key, record, flaws=(), missing=(_missing(workload),))
            else:
                _LOG.warning("pool %s isn't scaled: %s", key, error)
            return False

    async def _scale(
        self, key: str, pool: EnginePool, record: PoolRecord, ref: WorkloadRef
    ) -> bool:
        raw = await self._api.read(WORKLOADS[ref.kind], pool.metadata.namespace, ref.name)
        workload = read_workload(ref.kind, raw)
        pods, reports = self._pools.view.pods_of(pool), self._book.reports(key)
        self._note_told(key, pods)
        victims = choose_victims(
            pool,
            workload,
            pods,
            reports=reports,
            snapshot=record.compiled.snapshot,
            is_quiet=lambda pod: self._is_quiet(key, record, pod),
        )
        plan = plan_scale(pool, workload, pods, victims)
        self._judge(key, record, flaws=plan.flaws, missing=())
        await self._carry_out(pool, ref, plan)
        return plan.is_waiting

    async def _carry_out(self, pool: EnginePool, ref: WorkloadRef, plan: ScalePlan) -> None:
        namespace, name = pool.metadata.namespace, pool.metadata.name
        if plan.adopt is not None:
            _LOG.info("pool %s/%s takes over %d replicas", namespace, name, plan.adopt)
            await self._api.give_replicas(namespace, name, plan.adopt)
        for pods, reason, cost in (
            (plan.unmark, None, None),
            (plan.mark, SCALE_DOWN, VICTIM_COST),
        ):
            for pod in pods:
                _LOG.info("pod %s/%s: %s", namespace, pod, reason or "goes on")
                annotations = {DRAINING_ANNOTATION: reason, COST_ANNOTATION: cost}
                await self._api.annotate(PODS, namespace, pod, annotations)
        if plan.replicas is not None:
            _LOG.info("%s %s/%s gets %d replicas", ref.kind, namespace, ref.name, plan.replicas)
            # That nobody else claims them was looked up; who merely created it has them, too.
            workload = WORKLOADS[ref.kind]
            await self._api.set_replicas(workload, namespace, ref.name, plan.replicas)

    def _judge(
        self, key: str, record: PoolRecord, *, flaws: tuple[Flaw, ...], missing: tuple[Flaw, ...]
    ) -> None:
        if (flaws, missing) != (record.scale_flaws, record.scale_missing):
            record.scale_flaws, record.scale_missing = flaws, missing
            self._reporter.report(key)

    def _note_told(self, key: str, pods: Iterable[PodView]) -> None:
        """Remember since when each pod is seen to be told to drain."""
        now = asyncio.get_running_loop().time()
        known = {name for name in self._told_at if name.startswith(f"{key}/")}
        told = {f"{key}/{pod.uid}" for pod in pods if pod.draining == SCALE_DOWN}
        for name in known - told:
            del self._told_at[name]
        for name in told - known:
            self._told_at[name] = now

    def _is_quiet(self, key: str, record: PoolRecord, pod: PodView) -> bool:
        """Tell whether a victim needn't be waited for.

        It must have been seen to take no new work: until it isn't ready, routers send it some. Then
        its requests get the drain's timeout; without one they end within the engine's own grace.
        """
        told_at = self._told_at.get(f"{key}/{pod.uid}")
        if told_at is None:
            return False
        elapsed = asyncio.get_running_loop().time() - told_at
        if pod.is_ready and elapsed < NOTICE_SECONDS:
            return False
        report = self._book.reports(key).get(pod.name)
        timeout = record.compiled.snapshot.drain.seconds
        if timeout is None or report is None or elapsed >= timeout:
            return True
        return not (report.running or report.waiting or report.swapped)


def _missing(ref: WorkloadRef) -> Flaw:
    return Flaw(
        Reason.WORKLOAD_NOT_FOUND, f"spec.workloadRef: {ref.kind.lower()} {ref.name!r} not found"
    )
