"""The engine as a process: start, serve, drain, stop."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import disable_created_metrics
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_engine.core.step_scheduler import StepScheduler
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import Parts, load_parts
from tidegate_engine.policy_source import PolicySource, ed25519_verifier
from tidegate_engine.reports import Reporter
from tidegate_engine.server.admin import create_admin_app
from tidegate_engine.server.app import create_app
from tidegate_engine.server.service import Service, assemble
from tidegate_engine.settings import Settings, SettingsError
from tidegate_engine.state_file import StateFile
from tidegate_engine.tasks import cancel_all

EXIT_FAILED = 1
EXIT_BAD_SETTINGS = 2

_FLUSH_SECONDS = 3
"""How long clients may take to read the last bytes of their answers when the engine stops."""

_BACKLOG = 2048
_log = logging.getLogger("tidegate_engine")


@dataclass(frozen=True, slots=True)
class AdminDoor:
    """Where the admin API answers, and to whom.

    Attributes:
        token: What its callers present.
    """

    listener: socket.socket
    token: str


def main() -> int:
    """Run an engine from the environment until SIGTERM.

    Returns:
        The exit code: 0 after SIGTERM, 1 when it failed, 2 when a setting is wrong.
    """
    try:
        settings = Settings.from_environment()
        admin_token = settings.read_admin_token()
    except SettingsError as error:
        print(error, file=sys.stderr)  # noqa: T201 (there is no log yet)
        return EXIT_BAD_SETTINGS
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # They would add a third to the series of every tenant.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as listeners:
        try:
            # Bound before anything else runs: a port in use ends the start, not the run.
            listener = listeners.enter_context(_listen(settings.host, settings.port))
            admin = None
            if admin_token is not None:
                at_admin_port = _listen(settings.host, settings.admin_port)
                admin = AdminDoor(listeners.enter_context(at_admin_port), admin_token)
        except OSError as error:
            _log.error("the engine can't start: %s", error)
            return EXIT_FAILED
        return uvloop.run(run_engine(settings, listener, admin=admin))


async def run_engine(
    settings: Settings, listener: socket.socket, *, admin: AdminDoor | None
) -> int:
    """Answer on `listener` at once, load the model, and serve it until SIGTERM or SIGINT.

    Args:
        settings: Of this engine.
        listener: Of the API.
        admin: Of the admin API, which answers once the model is loaded; None = there is none.

    Returns:
        The exit code.
    """
    began = time.monotonic()
    asked_to_stop = asyncio.create_task(_stop_signal().wait())
    door = FrontDoor(time.monotonic)
    http = _http_server(door)
    serving = asyncio.create_task(http.serve([listener]))
    loading = asyncio.wrap_future(_load_beside(settings))
    await asyncio.wait({loading, serving, asked_to_stop}, return_when=FIRST_COMPLETED)
    if not loading.done():
XXX
    service = assemble(
        pool=settings.pool,
        scheduler=_scheduler(settings, parts, costs),
        executor=parts.executor,
        model=parts.model,
        clock=time.monotonic,
        wall_clock=time.time,
        max_waiting=settings.max_waiting,
    )
    redis = _redis(settings)
    servers = _http_servers(service, admin)
    listeners = (listener,) if admin is None else (listener, admin.listener)
    service.engine.start()
    _log_start(settings, parts, listener)
    if admin is not None:
        _log.info("admin API: http://%s:%d", *admin.listener.getsockname()[:2])
    _log_costs(costs)
    follow, report = _control_tasks(settings, service, redis)
    serving = asyncio.create_task(_serve_all(servers, listeners))
    asked_to_stop = asyncio.create_task(_stop_signal().wait())
    engine_ended = asyncio.create_task(service.stopped.wait())
    everything = (follow, report, serving, asked_to_stop, engine_ended)
    try:
        await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if asked_to_stop.done():
            _log.info("draining, at most %g s", settings.drain_seconds)
            await service.generations.drain(settings.drain_seconds)
    finally:
        failed = await _stop(service, servers, everything)
        await redis.aclose()
    return EXIT_FAILED if failed else 0


async def _stop(
    service: Service, servers: Sequence[uvicorn.Server], tasks: tuple["asyncio.Task[Any]", ...]
) -> bool:
    """Let the last answers out, then end everything.

    Returns:
        Whether any of `tasks` had ended by a defect, or before it was time.
    """
    follow, report, serving, asked_to_stop, engine_ended = tasks
    failed = not asked_to_stop.done()
    for server in servers:
        server.should_exit = True
    await asyncio.wait({serving})
    await asyncio.to_thread(service.engine.stop)
    await cancel_all((follow, report, asked_to_stop, engine_ended))
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, Exception):
            _log.error("a part of the engine broke", exc_info=end)
            failed = True
    return failed


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _scheduler(settings: Settings, parts: Parts, costs: ExecutorCosts) -> StepScheduler:
    capacity = parts.executor.capacity
    build: Callable[..., StepScheduler] = Scheduler
    if settings.batching != "continuous":
        build = partial(StaticScheduler, is_bucketed=settings.batching == "bucketed")
    return build(
        num_blocks=capacity.num_blocks,
        block_size=capacity.block_size,
        num_host_blocks=capacity.num_host_blocks,
        costs=costs,
        limits=EngineLimits(
            max_num_seqs=settings.max_num_seqs,
            max_batched_tokens=settings.max_batched_tokens,
            max_waiting=settings.max_waiting,
        ),
    )


def _redis(settings: Settings) -> Redis:
    return Redis.from_url(
        settings.redis_url,
        socket_timeout=settings.redis_timeout_seconds,
        socket_connect_timeout=settings.redis_timeout_seconds,
        health_check_interval=settings.redis_timeout_seconds,
        # Once, for connections that the server has closed; what lasts longer is an outage.
        retry=Retry(NoBackoff(), 1),
        client_name=settings.pod_name,
    )


def _control_tasks(
    settings: Settings, service: Service, redis: Redis
) -> tuple["asyncio.Task[None]", "asyncio.Task[None]"]:
    """Start following the policy and reporting."""
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
        incarnation=uuid.uuid4().hex,
        redis=redis,
        board=service.board,
        source=source,
        engine=service.engine,
    )
    return asyncio.create_task(source.run()), asyncio.create_task(reporter.run())


class _HttpServer(uvicorn.Server):
    """Leaves signals to us: a drain has to come before the shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _http_servers(service: Service, admin: AdminDoor | None) -> tuple[uvicorn.Server, ...]:
    """Return the server of the API and, where it has a door, that of the admin API."""
    api = _http_server(create_app(service))
    if admin is None:
        return (api,)
    return api, _http_server(create_admin_app(service, token=admin.token))


def _http_server(app: FastAPI) -> uvicorn.Server:
    return _HttpServer(
        uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            server_header=False,
        )
    )


async def _serve_all(servers: Sequence[uvicorn.Server], listeners: Sequence[socket.socket]) -> None:
    pairs = zip(servers, listeners, strict=True)
    await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))


def _stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _log_start(settings: Settings, parts: Parts, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    capacity = parts.executor.capacity
    _log.info(
        "serving %s: %s; %d KV blocks of %d tokens and %d in host memory, at most %d requests and"
        " %d tokens a step, %d waiting; pool %s, pod %s, http://%s:%d",
        parts.model.name,
        parts.summary,
        capacity.num_blocks,
        capacity.block_size,
        capacity.num_host_blocks,
        settings.max_num_seqs,
        settings.max_batched_tokens,
        settings.max_waiting,
        settings.pool,
        settings.pod_name,
        host,
        port,
    )


def _log_costs(costs: ExecutorCosts) -> None:
    _log.info(
        "a step takes %.3g ms, %.3g ms for each prompt token, %.3g ms for each decode, and more for"
        " long contexts; moving a KV block takes %.3g ms",
        1000 * costs.step_seconds,
        1000 * costs.prefill_token_seconds,
        1000 * costs.decode_seconds,
        1000 * costs.swap_block_seconds,
    )
