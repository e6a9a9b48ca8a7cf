"""Puts the operator together and runs it until it is told to stop."""

import asyncio
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import kopf
import uvloop
from pydantic import ValidationError
from redis.asyncio import Redis

from tidegate_operator.autoscaler_writer import AutoscalerScope
from tidegate_operator.dashboards import TenantDashboards
from tidegate_operator.delivery import Delivery
from tidegate_operator.events import EventWriter
from tidegate_operator.explanations import serving_explanations
from tidegate_operator.external_metrics import (
    ExternalMetrics,
    PoolSignals,
    serving_external_metrics,
)
from tidegate_operator.garbage import spare_garbage_collection
from tidegate_operator.handlers import build_registry, build_settings
from tidegate_operator.health import Health, serving_health
from tidegate_operator.keys import SigningKeyError, load_signing_key, signer
from tidegate_operator.kube import CUSTOM, SECRETS, KubeApi, Watched, login
from tidegate_operator.leader import Election, LeadershipLostError
from tidegate_operator.metrics import Metrics
from tidegate_operator.reconciler import Reconciler
from tidegate_operator.reports import ReportBook, ReportListener
from tidegate_operator.secret_watch import SecretWatch
from tidegate_operator.settings import Settings
from tidegate_operator.status import StatusWriter
from tidegate_operator.sweep import MissingKindError, Sweeper
from tidegate_operator.tasks import PartEndedError, cancel_all, end_process_in_time, in_a_line
from tidegate_operator.watch_cache import WatchCache
from tidegate_policies.envelope import Sign

_LOG = logging.getLogger(__name__)

REDIS_TIMEOUT_SECONDS = 2.0
REDIS_HEALTH_CHECK_SECONDS = 5

STALE_SWEEPS = 5
"""The watch counts as stale when nothing was listed or told of for so many sweeps."""


class Operator:
    """One operator process: what it knows, and what runs beside kopf."""

    def __init__(
        self, settings: Settings, *, sign: Sign, api: KubeApi, redis: "Redis", metrics: Metrics
    ) -> None:
        """Wire the parts together.

        Args:
            settings: As parsed from the environment.
            sign: Signs with the private key.
            api: Owned by the caller, like all that follow.
            redis: For policies and reports.
            metrics: Of this process.
        """
        self._settings = settings
        self._seen_at = time.monotonic()
        self._cache = WatchCache()
        self._events = EventWriter(api)
        self._writer = StatusWriter(
            api,
            metrics=metrics,
            writes_per_second=settings.status_writes_per_second,
            on_written=self._events.note,
        )
        self._reconciler = Reconciler(
            cache=self._cache,
            delivery=Delivery(redis, sign),
            book=ReportBook(),
            writer=self._writer,
            metrics=metrics,
            usage_seconds=settings.usage_seconds,
            scaling=api,
            scope=AutoscalerScope(
                namespaces=settings.namespaces, prometheus_url=settings.prometheus_url
            ),
        )
        self._sweeper = Sweeper(
            api,
            cache=self._cache,
            writer=self._writer,
            reconciler=self._reconciler,
            namespaces=settings.namespaces,
            secret_scopes=settings.secret_scopes,
            interval_seconds=settings.sweep_seconds,
        )
        self._secrets = SecretWatch(
            api,
            settings.secret_scopes,
            on_event=partial(self._on_event, SECRETS),
            on_gap=self._sweeper.request,
        )
        self._listener = ReportListener(
            redis,
            on_report=self._reconciler.take_report,
            on_connection=self._reconciler.set_listening,
        )
        self._dashboards = TenantDashboards(
            api,
            self._reconciler.policies_in_force,
            namespaces=settings.namespaces,
            interval_seconds=settings.sweep_seconds,
        )
        metrics.watch_age_from(self._watch_age_seconds)

    async def run(self, health: Health, take_signals: Callable[[], None]) -> None:
        """Run until cancelled.

        Args:
            health: Told when everything is known.
            take_signals: Called when kopf has put its own handlers in place of those that were.

        Raises:
            MissingKindError: The CustomResourceDefinitions are not installed.
            PartEndedError: Something that runs beside the rest did not go on.
        """
        health.is_alive = self._is_watching
        await self._sweeper.first()
        spare_garbage_collection()
        health.is_ready = True
        _LOG.info("all objects are listed; serving %s", self._settings.namespaces or "all")
        tasks = [asyncio.create_task(part, name=name) for name, part in self._parts().items()]
        # kopf comes last: what is started after it, it takes for its own and ends.
        watch = asyncio.create_task(self._watch(take_signals), name="the watch")
        try:
            # Better a restart than to be half alive.
            await asyncio.wait([watch, *tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            end_process_in_time()
            ended = [task for task in (*tasks, watch) if task.done()]
            watch.cancel()
            await cancel_all(tasks)
            await asyncio.wait([watch])
        raise PartEndedError(ended[0])

    def _parts(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return all that runs beside the watch, by name."""
        return {
            **self._reconciler.works(),
            "the writer of statuses": self._writer.run(),
            "the writer of Events": self._events.run(),
            "the sweep": self._sweeper.run(),
            "the listener to reports": self._listener.run(),
            "the watch of Secrets": self._secrets.run(),
            **(
                {"the writer of dashboards": self._dashboards.run()}
                if self._settings.tenant_dashboards
                else {}
            ),
        }

    async def _watch(self, take_signals: Callable[[], None]) -> None:
        others = asyncio.all_tasks()
        roots = await kopf.spawn_tasks(
            registry=build_registry(self._on_event, partial(login, self._settings.kubeconfig)),
            settings=build_settings(),
            standalone=True,
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
        )
        # At a signal kopf would wait for every connection that is served beside it.
        take_signals()
        await kopf.run_tasks(roots, ignored=others)

    def _on_event(self, watched: Watched, event_type: str | None, raw: Any) -> None:  # noqa: ANN401
        self._seen_at = time.monotonic()
        if event_type is None:
            # A watch lists anew: what was deleted in between it never tells.
            self._sweeper.request()
        if event_type == "DELETED":
            uid = raw["metadata"]["uid"]
            self._reconciler.mark(self._cache.remove(watched, uid))
            if watched in CUSTOM:
                self._writer.forget(uid)
                self._events.forget(uid)
        else:
            self._reconciler.mark(self._cache.put(watched, raw))

    def _is_watching(self) -> bool:
        return self._watch_age_seconds() < STALE_SWEEPS * self._settings.sweep_seconds

    def _watch_age_seconds(self) -> float:
        return time.monotonic() - max(self._seen_at, self._sweeper.listed_at)


async def run_operator(settings: Settings, sign: Sign) -> None:
    """Open the connections, run the operator while it leads, close them.

    Raises:
        MissingKindError: The CustomResourceDefinitions are not installed.
        LeadershipLostError: Another operator works now.
        PartEndedError: Something that runs beside the rest did not go on.
    """
    metrics, health = Metrics(), Health()
    asyncio.get_running_loop().set_exception_handler(tell_of_loop)
    take_signals = partial(_end_at_signals, asyncio.current_task())
    take_signals()
    async with AsyncExitStack() as stack:
        api = await stack.enter_async_context(KubeApi.connected(settings.kubeconfig))
        redis = _redis(settings)
        stack.push_async_callback(redis.aclose)
        if settings.metrics_port is not None:
            await stack.enter_async_context(
                serving_health(
                    health,
                    metrics.registry,
                    host=settings.metrics_host,
                    port=settings.metrics_port,
                )
            )
        if settings.explain_port is not None and settings.engine_token_file is not None:
            await stack.enter_async_context(
                serving_explanations(
                    api,
                    engine_token_file=settings.engine_token_file,
                    host=settings.explain_host,
                    port=settings.explain_port,
                )
            )
        if (served := _external_metrics(settings, api, redis)) is not None:
            await stack.enter_async_context(serving_external_metrics(served))
        if settings.lease is None:
            duties = []
        else:
            election = Election(api, settings.lease, f"{socket.gethostname()}_{uuid.uuid4().hex}")
            await election.can_read()
            # Whoever could take over at once is as ready as can be.
            health.is_ready = True
            stack.push_async_callback(election.release)
            await election.acquire()
            duties = [election.keep()]
        # Only now: what it knows of time and cluster must not be older than its leadership.
        operator = Operator(settings, sign=sign, api=api, redis=redis, metrics=metrics)
        await _until_one_ends(operator.run(health, take_signals), *duties)


def tell_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tell what the event loop met, but for what libraries leave behind.

    A watcher of kopf that is cancelled while it hands on an event doesn't close its generators. At
    the loop's end asyncio closes them all at once, and the outer complains of finding the inner
    closed; nothing of either runs any more.

    A connection that uvloop is told to give up just as it has opened it, and that the other side
    closes before the handshake of TLS, leaves an error to which nobody listens. And what TLS has
    to say over a connection that was closed meanwhile, uvloop tries to send, and complains.
    """
    exception, future = context.get("exception"), context.get("future")
    transport = context.get("transport")
    # A task is one of ours, and its end somebody's to know of.
    is_given_up = (
        isinstance(exception, OSError)
        and future is not None
        and not isinstance(future, asyncio.Task)
    )
    is_closed = (
        isinstance(exception, RuntimeError) and transport is not None and transport.is_closing()
    )
    if "asyncgen" in context or is_given_up or is_closed:
        _LOG.debug("%s: %r", context["message"], exception)
    else:
        loop.default_exception_handler(context)


def _end_at_signals(task: "asyncio.Task[Any] | None") -> None:
    """Have SIGTERM and SIGINT cancel a task, once however often they come."""

    def end() -> None:
        if task is not None and not task.cancelling():
            end_process_in_time()
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end)


async def _until_one_ends(*runs: Coroutine[Any, Any, None]) -> None:
    """Run all of them; the first that ends, ends them all."""
    tasks = [asyncio.create_task(run) for run in runs]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in ended:
        task.result()


def _external_metrics(settings: Settings, api: KubeApi, redis: "Redis") -> ExternalMetrics | None:
    port, certificates = settings.external_metrics_port, settings.external_metrics_certificates
    if port is None or certificates is None:
        return None
    return ExternalMetrics(
        api,
        PoolSignals(api, redis, settings.namespaces),
        certificates=certificates,
        host=settings.external_metrics_host,
        port=port,
    )


def _redis(settings: Settings) -> "Redis":
    ca_file = settings.redis_ca_file
    tls: dict[str, Any] = {} if ca_file is None else {"ssl_ca_certs": str(ca_file)}
    return Redis.from_url(
        settings.redis_url,
        socket_timeout=REDIS_TIMEOUT_SECONDS,
        socket_connect_timeout=REDIS_TIMEOUT_SECONDS,
        health_check_interval=REDIS_HEALTH_CHECK_SECONDS,
        **tls,
    )


def main() -> int:
    """Run the operator as a process; returns its exit code."""
    try:
        settings = Settings()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in problem["loc"]).upper()
            sys.stderr.write(f"TIDEGATE_OPERATOR_{name}: {problem['msg']}\n")
        return 2
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        sign = signer(load_signing_key(settings.signing_key_file))
        uvloop.run(run_operator(settings, sign))
    except asyncio.CancelledError:
        return 0
    except (SigningKeyError, MissingKindError, LeadershipLostError, PartEndedError) as error:
        _LOG.error("%s", error)
    except Exception as error:  # noqa: BLE001 - whatever it is, who looks finds one line
        _LOG.error("%s", in_a_line(error))
        _LOG.debug("where that came from", exc_info=True)
    return 1
