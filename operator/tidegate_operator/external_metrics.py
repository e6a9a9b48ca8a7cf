"""Serves the signals by which pools are scaled to HorizontalPodAutoscalers, as external metrics.

An aggregated API: `external.metrics.k8s.io/v1beta1`, which the API server asks on behalf of whoever
asks it. A namespace sees its own pools. Any replica answers, the leader or not: pools, pods and the
engines' last reports are read anew. Where Redis can't tell the reports there is no answer, and an
autoscaler that gets none leaves the replicas as they are.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tidegate_operator.autoscalers import pool_labels
from tidegate_operator.demand import demand
from tidegate_operator.front_proxy import FrontProxy, FrontProxyError
from tidegate_operator.kube import PODS, POOLS, ApiError, KubeApi
from tidegate_operator.metrics import DEMAND
from tidegate_operator.progress import Engines
from tidegate_operator.reports import read_reports
from tidegate_operator.resources import EnginePool
from tidegate_operator.selectors import SelectorError, parse_selector, selector_text
from tidegate_operator.tasks import cancel_all
from tidegate_operator.watch_cache import WatchCache

_LOG = logging.getLogger(__name__)

GROUP_VERSION = "external.metrics.k8s.io/v1beta1"
SIGNALS = {f"tidegate_pool_{name}": name for name in DEMAND}
"""What is served: the fields of Demand by the names of their series."""

# What merely decodes to a path could lead out of the namespace that was authorised.
_NAMESPACED = f"/apis/{GROUP_VERSION}/namespaces/{{namespace:[-a-z0-9]+}}/{{metric}}"

LOOK_SECONDS = 30.0
"""How often it is looked whether certificates were renewed, the own or the API server's."""

RETRY_SECONDS = 2.0
"""How soon it is tried again while nothing can be served."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_ERRORS = (ApiError, FrontProxyError, aiohttp.ClientError, OSError, TimeoutError)


class PoolSignals:
    """Measures the load of pools, when asked."""

    def __init__(self, api: KubeApi, redis: "Redis", namespaces: Sequence[str]) -> None:
        """Measure nothing yet.

        Args:
            api: To read pools and pods.
            redis: To read what engines last reported.
            namespaces: The only ones that are served; empty = all.
        """
        self._api = api
        self._redis = redis
        self._namespaces = namespaces

    async def values(self, namespace: str, metric: str, selector: str) -> list[Any]:
        """Return a metric of all pools that a namespace has and the selector chooses.

        Args:
            namespace: Where the pools are.
            metric: One of SIGNALS.
            selector: By the labels of `pool_labels`.

        Raises:
            SelectorError: It is no selector.
            ApiError: The API server refused to tell the pools or their pods.
            RedisError: What engines report can't be read.
        """
        chosen = parse_selector(selector)
        if self._namespaces and namespace not in self._namespaces:
            return []
        cache = WatchCache()
        for raw in await self._api.list_objects(POOLS, [namespace]):
            cache.put(POOLS, raw)
        items = []
        for pool in cache.view().pools.values():
            labels = pool_labels(namespace, pool.metadata.name)
            if chosen.matches(labels):
                found = asdict(demand(pool, await self._engines(pool)))
                items.append(_item(metric, labels, found[SIGNALS[metric]]))
        return items

    async def _engines(self, pool: EnginePool) -> Engines:
        cache = WatchCache()
        pods = replace(PODS, label_selector=selector_text(pool.spec.selector))
        for raw in await self._api.list_objects(pods, [pool.metadata.namespace]):
            cache.put(PODS, raw)
        found = cache.view().pods_of(pool)
        key = pool.metadata.qualified_name
        reports = await read_reports(self._redis, key, [pod.name for pod in found])
        return Engines(pods=found, reports=reports)


@dataclass(frozen=True, slots=True)
class _Trust:
    """What connections are made by: as long as it is the same, the server can stay."""

    proxy: FrontProxy
    certificate: bytes
    key: bytes


class ExternalMetrics:
    """The server, made anew when the certificates that it lives by are."""

    def __init__(
        self, api: KubeApi, signals: PoolSignals, *, certificates: Path, host: str, port: int
    ) -> None:
        """Serve nothing yet.

        Args:
            api: To learn how the API server is known.
            signals: What is served.
            certificates: Folder with `tls.crt` and `tls.key`, for the name of the Service.
            host: The address to serve on.
            port: There.
        """
        self._api = api
        self._signals = signals
        self._certificate = certificates / "tls.crt"
        self._key = certificates / "tls.key"
        self._host = host
        self._port = port

    async def run(self) -> None:
        """Serve until cancelled."""
        known: _Trust | None = None
        async with AsyncExitStack() as serving:
            while True:
                try:
                    found = await self._look()
                    if found != known:
                        # First: with what is wrong or half written, the old one goes on.
                        tls = found.proxy.tls(self._certificate, self._key)
                        await serving.aclose()
                        known = None
                        await serving.enter_async_context(self._serving(found.proxy, tls))
                        known = found
                except _ERRORS as error:
                    state = "not served" if known is None else "served with the old certificates"
                    _LOG.warning("external metrics are %s: %s", state, error)
                await asyncio.sleep(RETRY_SECONDS if known is None else LOOK_SECONDS)

    async def _look(self) -> _Trust:
        proxy = await FrontProxy.read(self._api)
        certificate = await asyncio.to_thread(self._certificate.read_bytes)
        return _Trust(proxy, certificate, await asyncio.to_thread(self._key.read_bytes))

    @asynccontextmanager
    async def _serving(self, proxy: FrontProxy, tls: ssl.SSLContext) -> AsyncIterator[None]:
        runner = web.AppRunner(self._app(proxy), access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port, ssl_context=tls)
            await site.start()
            _LOG.info("external metrics are served")
            yield
        finally:
            await runner.cleanup()

    def _app(self, proxy: FrontProxy) -> web.Application:
        @web.middleware
        async def checked(request: web.Request, handler: _Handler) -> web.StreamResponse:
            certificate = request.get_extra_info("peercert") or {}
            if not proxy.trusts(certificate):
                return _refusal(401, "Unauthorized", "the client is not the API server")
            try:
                return await handler(request)
            except web.HTTPNotFound:
                return _refusal(404, "NotFound", f"there is no {request.path}")
            except SelectorError as error:
                return _refusal(400, "BadRequest", str(error))
            except (RedisError, *_ERRORS) as error:
                _LOG.warning("the load of pools can't be measured: %s", error)
                return _refusal(503, "ServiceUnavailable", "what engines report can't be read")

        app = web.Application(middlewares=[checked])
        app.add_routes(
            [
                web.get(f"/apis/{GROUP_VERSION}", self._list_metrics),
                web.get(_NAMESPACED, self._list),
            ]
        )
        return app

    async def _list_metrics(self, _: web.Request) -> web.Response:
        resources = [
            {
                "name": name,
                "singularName": "",
                "namespaced": True,
                "kind": "ExternalMetricValueList",
                "verbs": ["get"],
            }
            for name in SIGNALS
        ]
        return _answer("APIResourceList", "v1", groupVersion=GROUP_VERSION, resources=resources)

    async def _list(self, request: web.Request) -> web.Response:
        namespace, metric = request.match_info["namespace"], request.match_info["metric"]
        if metric not in SIGNALS:
            raise web.HTTPNotFound
        selector = request.query.get("labelSelector", "")
        items = await self._signals.values(namespace, metric, selector)
        return _answer("ExternalMetricValueList", GROUP_VERSION, metadata={}, items=items)


@asynccontextmanager
async def serving_external_metrics(metrics: ExternalMetrics) -> AsyncIterator[None]:
    """Serve for the length of the block."""
    task = asyncio.create_task(metrics.run())
    try:
        yield
    finally:
        await cancel_all([task])


def _item(metric: str, labels: Mapping[str, str], value: float) -> object:
    return {
        "metricName": metric,
        "metricLabels": labels,
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": _quantity(value),
    }


def _quantity(value: float) -> str:
    """Write a number as Kubernetes does: whole, or in thousandths."""
    thousandths = round(value * 1000)
    return f"{thousandths}m" if thousandths % 1000 else str(thousandths // 1000)


def _answer(kind: str, version: str, **fields: object) -> web.Response:
    return web.json_response({"kind": kind, "apiVersion": version, **fields})


def _refusal(code: int, reason: str, message: str) -> web.Response:
    told = {"status": "Failure", "reason": reason, "message": message, "code": code}
    answer = _answer("Status", "v1", metadata={}, **told)
    answer.set_status(code)
    return answer
