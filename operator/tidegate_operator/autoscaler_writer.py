"""Writes the autoscalers of pools, and removes those that no pool asks for any more."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from tidegate_operator.autoscalers import OWN_LABEL, autoscaler, driver_of, holds
from tidegate_operator.kube import ApiError, Watched
from tidegate_operator.pools import Pools
from tidegate_operator.reporter import Reporter
from tidegate_operator.resources import AutoscalingDriver, EnginePool
from tidegate_operator.verdicts import Flaw, Reason

_LOG = logging.getLogger(__name__)

_OWN = f"{OWN_LABEL}=true"
KINDS = {
    AutoscalingDriver.HPA: Watched(
        group="autoscaling",
        version="v2",
        plural="horizontalpodautoscalers",
        label_selector=_OWN,
    ),
    AutoscalingDriver.KEDA: Watched(
        group="keda.sh", version="v1alpha1", plural="scaledobjects", label_selector=_OWN
    ),
}

REST_SECONDS = 30.0
"""How often it is looked what somebody else changed or deleted."""

RETRY_SECONDS = 5.0
"""How soon it is looked again where the API server couldn't say."""

_NOT_FOUND = 404
_ERRORS = (ApiError, aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerScope:
    """Where autoscalers are written.

    Attributes:
        namespaces: The only ones that are served; empty = all.
        prometheus_url: Where KEDA finds the operator's metrics; None = nobody said.
    """

    namespaces: Sequence[str] = ()
    prometheus_url: str | None = None


class AutoscalerApi(Protocol):
    """Where autoscalers are."""

    async def list_objects(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        """Return all objects of a kind as JSON."""

    async def apply(self, watched: Watched, manifest: Any) -> None:  # noqa: ANN401
        """Make an object what `manifest` says of it."""

    async def delete(self, watched: Watched, namespace: str, name: str) -> None:
        """Delete an object, unless it is gone."""


class AutoscalerWriter:
    """Keeps the autoscalers of all pools as their specs say."""

    def __init__(
        self,
        api: AutoscalerApi,
        pools: Pools,
        *,
        reporter: Reporter,
        scope: AutoscalerScope,
    ) -> None:
        self._api = api
        self._pools = pools
        self._reporter = reporter
        self._namespaces = scope.namespaces
        self._prometheus_url = scope.prometheus_url
        self._seen: tuple[object, ...] | None = None
        self._wake = asyncio.Event()

    def look(self) -> None:
        """Compare soon, if pools have changed: that policies do makes no difference."""
        view = self._pools.view
        seen = (view.pools, view.invalid)
        if seen != self._seen:
            self._seen = seen
            self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        # Before the pools are known, no autoscaler would seem to have one.
        await self._wake.wait()
        while True:
            self._wake.clear()
            rest_seconds = REST_SECONDS
            for driver in KINDS:
                try:
                    await self._compare(driver)
                except _ERRORS as error:
                    _LOG.warning("autoscalers of %s aren't written: %s", driver, error)
                    rest_seconds = RETRY_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout(rest_seconds):
                    await self._wake.wait()

    async def _compare(self, driver: AutoscalingDriver) -> None:
        wanted = {
            key: pool for key, pool in self._pools.view.pools.items() if driver_of(pool) is driver
        }
        kind = KINDS[driver]
        try:
            found = await self._api.list_objects(kind, self._namespaces)
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            absent = f"the cluster has no {kind.plural}.{kind.group}"
            self._judge(dict.fromkeys(wanted, absent))
            return
        stored = {(o["metadata"]["namespace"], o["metadata"]["name"]): o for o in found}
        self._judge({key: await self._write(kind, pool, stored) for key, pool in wanted.items()})
        # What a pool that can't be read wants is unknown: it keeps what it has.
        unread = {invalid.metadata.uid for invalid in self._pools.view.invalid}
        for (namespace, name), known in stored.items():
            owners = known["metadata"].get("ownerReferences") or ()
            if not any(owner["uid"] in unread for owner in owners):
                await self._api.delete(kind, namespace, name)

    async def _write(
        self, kind: Watched, pool: EnginePool, stored: dict[tuple[str, str], Any]
    ) -> str:
        """Write what a pool wants unless it is there, and take it out of `stored`.

        Returns:
            Why that can't be; empty = it is as wanted.
        """
        scaling = pool.spec.autoscaling
        if scaling is None:
            return ""
        manifest = autoscaler(pool, scaling, prometheus_url=self._prometheus_url or "")
        metadata = manifest["metadata"]
        known = stored.pop((metadata["namespace"], metadata["name"]), None)
        if scaling.driver is AutoscalingDriver.KEDA and self._prometheus_url is None:
            return "the operator isn't told where Prometheus is"
        if holds(manifest, known):
            return ""
        try:
            await self._api.apply(kind, manifest)
        except ApiError as error:
            return f"the API server refused it ({error})"
        return ""

    def _judge(self, problems: Mapping[str, str]) -> None:
        """Say of these pools what is wrong, and of those without driver that nothing is."""
        for key, record in self._pools.records.items():
            pool = self._pools.view.pools.get(key)
            if pool is None or (
                key not in problems and driver_of(pool) is not AutoscalingDriver.NONE
            ):
                continue
            flaws: tuple[Flaw, ...] = ()
            if problem := problems.get(key):
                message = f"spec.autoscaling: no autoscaler is written, as {problem}"
                flaws = (Flaw(Reason.INVALID, message),)
            if flaws != record.autoscaler_flaws:
                record.autoscaler_flaws = flaws
                self._reporter.report(key)
