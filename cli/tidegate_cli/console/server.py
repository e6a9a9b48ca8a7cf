"""`tidegate console`: runs the page until Ctrl-C."""

import asyncio
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from kubernetes.aio.config import KUBE_CONFIG_DEFAULT_LOCATION
from nicegui import ui
from redis.asyncio import Redis
from rich.console import Console

from tidegate_cli.console.explain import EngineLookup, Explain, RequestLookup
from tidegate_cli.console.gate import PARAMETER, Gate, is_loopback
from tidegate_cli.console.pages import build_pages
from tidegate_cli.console.watch import FleetWatch
from tidegate_cli.errors import CommandError
from tidegate_cli.place import OPERATOR

TOKEN_BYTES = 24
REDIS_TIMEOUT_SECONDS = 5.0
STOP_SECONDS = 1


class ListenError(CommandError):
    """The address is taken, or isn't one of this machine.

    Attributes:
        address: `host:port`.
    """

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"can't listen on {address}: {reason}")
        self.address = address


@dataclass(frozen=True, kw_only=True)
class ConsoleSettings:
    """Where the console listens, and what it reads.

    Attributes:
        port: 0 = any free one.
        token: What visitors present; None = nothing on loopback, one that is made up elsewhere.
        kubeconfig: None = as kubectl finds it, else the service account of the pod.
        redis_ca_file: Certificates that Redis' own is checked against; None = the system's.
        namespaces: Only what is in these; empty = all.
        operator: Whom to ask about requests, as in `Place`.
        engine_token_file: With it engines are asked about requests, and not the operator.
    """

    host: str = "127.0.0.1"
    port: int = 8090
    token: str | None = None
    kubeconfig: Path | None = None
    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_ca_file: Path | None = None
    namespaces: tuple[str, ...] = ()
    operator: str = OPERATOR
    engine_token_file: Path | None = None


async def run_console(console: Console, *, settings: ConsoleSettings) -> None:
    """Serve the page until cancelled; tells where it is.

    Raises:
        ListenError: The address can't be listened on.
    """
    token = settings.token
    if token is None and not is_loopback(settings.host):
        token = secrets.token_urlsafe(TOKEN_BYTES)
    with _listening(settings.host, settings.port) as listener:
        redis = _redis(settings)
        try:
            watch = FleetWatch(
                redis,
                redis_url=settings.redis_url,
                kubeconfig=settings.kubeconfig or _own_kubeconfig(),
                namespaces=settings.namespaces,
            )
            explain = _lookup(settings, lambda: watch.fleet().pool_names)
            url = _url(settings.host, listener.getsockname()[1], token)
            console.print(f"Tidegate console: {url}", highlight=False, soft_wrap=True)
            await _serve(console_app(watch, explain, token=token), listener, watch)
        finally:
            await redis.aclose()


def console_app(watch: FleetWatch, explain: Explain, *, token: str | None) -> FastAPI:
    """Build the application; once in a process, as NiceGUI has one set of pages.

    Args:
        watch: What the pages show; runs beside.
        explain: Where requests are looked up.
        token: What visitors present; None = only requests to a loopback host get in.
    """
    app = FastAPI(openapi_url=None)
    build_pages(watch, explain)
    ui.run_with(
        app,
        title="Tidegate",
        language="en-US",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        favicon=_FAVICON,
    )
    app.add_middleware(Gate, token=token)
    return app


_FAVICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    '<rect width="16" height="16" rx="3" fill="#1257b8"/>'
    '<path d="M3 10c2-3 3-3 5 0s3 3 5 0M3 6h10" stroke="#fff" stroke-width="1.6" fill="none"/>'
    "</svg>"
)


class _Server(uvicorn.Server):
    """Leaves signals to the command, which is cancelled by them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, listener: socket.socket, watch: FleetWatch) -> None:
    server = _Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=STOP_SECONDS
        )
    )
    watching = asyncio.create_task(watch.run())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        # One that ends by itself has failed.
        await asyncio.wait({watching, serving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in (watching, serving) if task.done()]
        server.should_exit = True
        watching.cancel()
        await asyncio.wait({watching, serving})
    for task in ended:
        task.result()


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(f"{host}:{port}", error.strerror or str(error)) from error
    with listener:
        yield listener


def _url(host: str, port: int, token: str | None) -> str:
    shown = socket.gethostname() if host in {"0.0.0.0", "::"} else host
    shown = f"[{shown}]" if ":" in shown else shown
    return f"http://{shown}:{port}/" + (f"?{PARAMETER}={token}" if token else "")


def _own_kubeconfig() -> Path | None:
    """Return kubectl's default; None where there is none, as in a pod."""
    path = Path(KUBE_CONFIG_DEFAULT_LOCATION).expanduser()
    return path if path.exists() else None


def _lookup(settings: ConsoleSettings, pools: Callable[[], Sequence[str]]) -> Explain:
    if settings.engine_token_file is not None:
        kubeconfig = settings.kubeconfig or _own_kubeconfig()
        return EngineLookup(pools, kubeconfig=kubeconfig, token_file=settings.engine_token_file)
    return RequestLookup(pools, kubeconfig=settings.kubeconfig, operator=settings.operator)


def _redis(settings: ConsoleSettings) -> "Redis":
    ca_file = settings.redis_ca_file
    tls: dict[str, Any] = {} if ca_file is None else {"ssl_ca_certs": str(ca_file)}
    return Redis.from_url(
        settings.redis_url,
        socket_timeout=REDIS_TIMEOUT_SECONDS,
        socket_connect_timeout=REDIS_TIMEOUT_SECONDS,
        **tls,
    )
