"""The HTTP server of an engine: what connections may cost, however many come and whatever they do.

Who sends nothing, sends without end, or reads nothing is cut off after a while; what one connection
holds until then is bounded, and so is their number. Refusals leave probes, scrapes and cancels
alone: they are what helps in an overload.
"""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tidegate_engine.server.http_connection import HttpConnection
from tidegate_engine.server.open_requests import OpenRequests

MAX_CONNECTIONS = 16_384
"""Open at once; an idle one takes some 10 KB. Fewer where the process may open fewer files."""

MAX_OPEN_BODY_BYTES = 256 * 1024 * 1024
"""What has come of bodies of requests that are being received, queued or answered."""

REQUEST_SECONDS = 30
"""From connecting, or from a request's first byte, to its last."""

IDLE_SECONDS = 75
"""How long a connection waits for a further request: longer than gateways keep theirs (60 s is
usual), so that they close it. A request that meets a closing connection fails."""

UNREAD_SECONDS = 60
"""How long a client may take nothing of what waits for it; then its connection is gone."""

FLUSH_SECONDS = 3
"""How long clients may take to read the last bytes of their answers when the engine stops."""

_RESERVED_FILES = 256
_BACKLOG = 2048
# Beyond what a stream needs at any round trip time; the system's own choice can be megabytes.
_SEND_BUFFER_BYTES = 64 * 1024
_KEEPALIVE_SECONDS = 15
_KEEPALIVE_PROBES = 3


def listen(host: str, port: int, *, unread_seconds: float = UNREAD_SECONDS) -> socket.socket:
    """Return a listening socket whose connections end when their clients have vanished.

    Args:
        host: Address; one with a colon is IPv6.
        port: 0 = any free one.
        unread_seconds: How long a client may take nothing of what waits for it.

    Raises:
        OSError: The address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    # Accepted connections inherit all of these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_USER_TIMEOUT, round(1000 * unread_seconds)),
            (socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS),
            (socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS),
            (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
        ):
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener


def connections_that_fit() -> int:
    """Let the process open more files, if need be, and return how many connections that allows."""
    wanted = MAX_CONNECTIONS + _RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (wanted if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(MAX_CONNECTIONS, max(1, soft - _RESERVED_FILES))


class HttpServer(uvicorn.Server):
    """Serves an application on a socket of `listen` until `should_exit` is set.

    Signals are left to others: a drain has to come before the shutdown.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_body_bytes: int = MAX_OPEN_BODY_BYTES,
        request_seconds: float = REQUEST_SECONDS,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        """Prepare.

        Args:
            app: What is served.
            max_connections: Most connections; a fourth of them is for others than open requests.
            max_body_bytes: Of all open requests together, as far as they have come.
            request_seconds: How long a request may take to come.
            flush_seconds: How long clients may read on once `should_exit` is set.
        """
        bounded = OpenRequests(
            app, max_requests=max(1, max_connections * 3 // 4), max_body_bytes=max_body_bytes
        )
        connection: Any = partial(
            HttpConnection, max_connections=max_connections, request_seconds=request_seconds
        )
        super().__init__(
            uvicorn.Config(
                bounded,
                http=connection,
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                # After the cut, so that tasks end by themselves.
                timeout_graceful_shutdown=round(flush_seconds) + 1,
                timeout_keep_alive=IDLE_SECONDS,
                server_header=False,
            )
        )
        self._flush_seconds = flush_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close what is idle, let answers out, and cut off who hasn't read them by then."""
        event_loop = asyncio.get_running_loop()
        cut = event_loop.call_later(self._flush_seconds, self._cut_off)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
