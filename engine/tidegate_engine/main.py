"""The engine as a process: start, serve, drain, stop."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_engine.core.step_scheduler import StepScheduler
from tidegate_engine.fleet.bucket_script import BucketStore
from tidegate_engine.fleet.rates import EXPIRY_SECONDS, FleetRates
from tidegate_engine.fleet.services import ServiceExchange
from tidegate_engine.fleet.size import FleetSize
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import Parts, load_parts
from tidegate_engine.policy_source import PolicySource, ed25519_verifier
from tidegate_engine.reports import Reporter, TenantBooks
from tidegate_engine.server.connections import listen
from tidegate_engine.server.leave import Leave
from tidegate_engine.server.ports import AdminDoor, Ports
from tidegate_engine.server.service import Service, assemble
from tidegate_engine.settings import Settings, SettingsError, variable_of
from tidegate_engine.start_errors import StartError
from tidegate_engine.state_file import StateFile
from tidegate_engine.summary import aligned, start_summary
from tidegate_engine.tasks import cancel_all

if TYPE_CHECKING:
    from tidegate_engine.server.otlp import TraceExporter

EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2

_log = logging.getLogger("tidegate_engine")


def main() -> int:
    """Run an engine from the environment until SIGTERM.

    Returns:
        The exit code: 0 after SIGTERM, 1 when it failed, 2 when a setting is wrong.
    """
    try:
        settings = Settings.from_environment()
        admin_token = settings.read_admin_token()
        gateway_token = settings.read_gateway_token()
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201 (there is no log yet)
        return EXIT_BAD_SETTINGS
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with contextlib.ExitStack() as listeners:
        try:
            # Bound before anything else runs: probes are answered while a model loads, and a port
            # in use ends the start, not the run.
            listener = listeners.enter_context(listen(settings.host, settings.port))
            admin = None
            if admin_token is not None:
                at_admin_port = listen(settings.host, settings.admin_port)
                admin = AdminDoor(listeners.enter_context(at_admin_port), admin_token)
        except OSError as error:
            _log.error("the engine can't start: %s", error)
            return EXIT_FAILED
        return uvloop.run(run_engine(settings, listener, admin=admin, gateway_token=gateway_token))


async def run_engine(
    settings: Settings,
    listener: socket.socket,
    *,
    admin: AdminDoor | None,
    gateway_token: str | None,
) -> int:
    """Answer on `listener` at once, load the model, and serve it until SIGTERM or SIGINT.

    Args:
        settings: Of this engine.
        listener: Of the API.
        admin: Of the admin API; None = there is none.
        gateway_token: What a trusted gateway presents; None = none is trusted.

    Returns:
        The exit code.
    """
    began = time.monotonic()
    asked_to_stop = asyncio.create_task(_stop_signal().wait())
    ports = Ports(listener, admin=admin, clock=time.monotonic)
    serving = asyncio.create_task(ports.serve())
    try:
        exporter = _trace_exporter(settings)
        parts = await _load(settings, asked_to_stop)
    except (ModelLoadError, StartError, OSError) as error:
        _log.error("the engine can't start: %s", error)
        ports.stop()
        await serving
        await cancel_all({asked_to_stop})
        return EXIT_FAILED
    redis = redis_client(settings)
    incarnation = uuid.uuid4().hex
    rates = _rates(settings, redis, incarnation)
    service = assemble(
        pool=settings.pool,
        scheduler=_scheduler(settings, parts),
        executor=parts.executor,
        model=parts.model,
        rates=rates,
        clock=time.monotonic,
        max_waiting=settings.max_waiting,
        export_trace=exporter.export if exporter is not None else None,
    )
    leave = Leave(service.generations, settings, clock=service.clock)
    service.board.on_change.append(leave.use_policy)
    if gateway_token is not None:
        service.identities.trust_gateway(gateway_token)
    service.engine.start()
    ports.open(service)
    _log_start(settings, parts, listener, seconds=time.monotonic() - began)
    if admin is not None:
        _log.info("admin API: http://%s:%d", *admin.listener.getsockname()[:2])
    running = _Running(
        serving=serving,
        asked_to_stop=asked_to_stop,
        engine_ended=asyncio.create_task(service.stopped.wait()),
        in_pool=_tasks_in_pool(settings, service, redis, rates=rates, incarnation=incarnation),
    )
    try:
        await asyncio.wait(running.tasks, return_when=asyncio.FIRST_COMPLETED)
        if asked_to_stop.done():
            grace_seconds = leave.grace_seconds()
            _log.info("draining, at most %g s", grace_seconds)
            await service.generations.drain(grace_seconds)
    finally:
        failed = await _stop(service, ports, running)
        await redis.aclose()
        if exporter is not None:
            await asyncio.to_thread(exporter.close)
    return EXIT_FAILED if failed else 0


def redis_client(settings: Settings) -> Redis:
    """Return the engine's way to Redis; nothing is connected yet."""
    ca_file = settings.redis_ca_file
    tls: dict[str, Any] = {} if ca_file is None else {"ssl_ca_certs": str(ca_file)}
    return Redis.from_url(
        settings.redis_url,
        socket_timeout=settings.redis_timeout_seconds,
        socket_connect_timeout=settings.redis_timeout_seconds,
        health_check_interval=settings.redis_timeout_seconds,
        # Once, for connections that the server has closed; what lasts longer is an outage.
        retry=Retry(NoBackoff(), 1),
        client_name=settings.pod_name,
        **tls,
    )


def _trace_exporter(settings: Settings) -> "TraceExporter | None":
    if not settings.traces_url:
        return None
    # An extra of the distribution, which only those need who use it.
    try:
        from tidegate_engine.server.otlp import TraceExporter
    except ModuleNotFoundError as error:
        problem = f"{error}; install tidegate[tracing]"
        raise StartError(variable_of(settings.traces_field), problem) from error

    return TraceExporter(
        settings.traces_url,
        pool=settings.pool,
        pod=settings.pod_name,
        model=settings.model_name,
        epoch_at=lambda: time.time() - time.monotonic(),
    )


async def _load(settings: Settings, asked_to_stop: "asyncio.Task[Any]") -> Parts:
    """Load beside the event loop, which answers probes meanwhile; end the process on a signal."""
    load = partial(load_parts, settings, created=int(time.time()))
    # Not asyncio's threads, which stay: OpenMP keeps a team for each thread that has computed, and
    # with more threads than cores in its teams all of them sleep at every barrier of a step.
    loader = ThreadPoolExecutor(max_workers=1)
    loading = asyncio.get_running_loop().run_in_executor(loader, load)
    loader.shutdown(wait=False)
    await asyncio.wait({loading, asked_to_stop}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        _log.info("stopped while loading")
        # The thread that loads can't be interrupted, and nothing has begun that needs an end.
        os._exit(0)
    return await loading


@dataclass(frozen=True, slots=True)
class _Running:
    """What runs from the start to the end of an engine.

    Attributes:
        in_pool: What ties it to its pool: policies, reports, rates, shares.
    """

    serving: "asyncio.Task[Any]"
    asked_to_stop: "asyncio.Task[Any]"
    engine_ended: "asyncio.Task[Any]"
    in_pool: tuple["asyncio.Task[None]", ...]

    @property
    def tasks(self) -> tuple["asyncio.Task[Any]", ...]:
        """All of it."""
        return (self.serving, self.asked_to_stop, self.engine_ended, *self.in_pool)


async def _stop(service: Service, ports: Ports, running: _Running) -> bool:
    """Let the last answers out, then end everything.

    Returns:
        Whether any of the tasks had ended by a defect, or before it was time.
    """
    failed = not running.asked_to_stop.done()
    ports.stop()
    await asyncio.wait({running.serving})
    await asyncio.to_thread(service.engine.stop)
    await cancel_all((running.asked_to_stop, running.engine_ended, *running.in_pool))
    ends = await asyncio.gather(*running.tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            _log.error("a part of the engine broke", exc_info=end)
            failed = True
    return failed


def _scheduler(settings: Settings, parts: Parts) -> StepScheduler:
    capacity = parts.executor.capacity
    build: Callable[..., StepScheduler] = Scheduler
    if settings.batching != "continuous":
        build = partial(StaticScheduler, is_bucketed=settings.batching == "bucketed")
    return build(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        num_host_blocks=capacity.num_host_blocks,
        costs=parts.costs,
        limits=EngineLimits(
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_batched_tokens,
            max_waiting=settings.max_waiting,
        ),
    )


def _rates(settings: Settings, redis: Redis, incarnation: str) -> FleetRates:
    store = BucketStore(
        redis, pool=settings.pool, engine=incarnation, expiry_seconds=EXPIRY_SECONDS
    )
    size = FleetSize(StateFile(settings.engines_file))
    return FleetRates(store, clock=time.monotonic, size=size)


def _tasks_in_pool(
    settings: Settings, service: Service, redis: Redis, *, rates: FleetRates, incarnation: str
) -> tuple["asyncio.Task[None]", ...]:
    """Start following the policy, reporting, and sharing limits and service with others."""
    source = PolicySource(
        pool=settings.pool,
        redis=redis,
        verify=ed25519_verifier(settings.verify_key),
        board=service.board,
        state=StateFile(settings.policy_file),
    )

    reporter = Reporter(
        pod=settings.pod_name,
        pool=settings.pool,
        incarnation=incarnation,
        redis=redis,
        board=service.board,
        source=source,
        rates=rates,
        engine=service.engine,
        tenants=TenantBooks(levels=service.levels, metrics=service.metrics),
    )
    exchange = ServiceExchange(
        redis,
        pool=settings.pool,
        engine=incarnation,
        served=lambda: service.engine.last_stats.scheduler.accounts,
        listener=service.engine.note_elsewhere,
    )
    runs = (source.run(), reporter.run(), rates.run(), exchange.run())
    return tuple(asyncio.create_task(run) for run in runs)


def _stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _log_start(
    settings: Settings, parts: Parts, listener: socket.socket, *, seconds: float
) -> None:
    host, port = listener.getsockname()[:2]
    summary = start_summary(
        settings,
        parts.summary,
        parts.costs,
        parts.executor.capacity,
        url=f"http://{host}:{port}",
        seconds=seconds,
    )
    # A record for each line, since collectors of logs take lines apart anyway.
    for line in aligned(summary):
        _log.info("%s", line)
