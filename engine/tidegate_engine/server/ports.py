"""The ports of one engine: they answer from the start, whatever there is behind them yet."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

from tidegate_engine.server.admin import create_admin_app
from tidegate_engine.server.app import create_app
from tidegate_engine.server.connections import HttpServer, connections_that_fit
from tidegate_engine.server.front_door import FrontDoor
from tidegate_engine.server.service import Service

_MAX_ADMIN_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class AdminDoor:
    """Where the admin API answers, and to whom.

    Attributes:
        token: What its callers present.
    """

    listener: socket.socket
    token: str


class Ports:
    """The HTTP servers of an engine, each behind a front door."""

    def __init__(
        self, listener: socket.socket, *, admin: AdminDoor | None, clock: Callable[[], float]
    ) -> None:
        """Prepare; `serve` begins.

        Args:
            listener: Of the API.
            admin: Of the admin API; None = there is none.
            clock: The engine's.
        """
        self._admin = admin
        self._listeners = [listener] if admin is None else [listener, admin.listener]
        self._doors = [FrontDoor(clock) for _ in self._listeners]
        most = (connections_that_fit(), _MAX_ADMIN_CONNECTIONS)
        self._servers = [
            HttpServer(door, max_connections=count)
            for door, count in zip(self._doors, most, strict=False)
        ]

    def open(self, service: Service) -> None:
        """Let the APIs over `service` answer from here on."""
        self._doors[0].open(create_app(service))
        if self._admin is not None:
            self._doors[1].open(create_admin_app(service, token=self._admin.token))

    async def serve(self) -> None:
        """Answer until `stop`."""
        pairs = zip(self._servers, self._listeners, strict=True)
        await asyncio.gather(*(server.serve([listener]) for server, listener in pairs))

    def stop(self) -> None:
        """Let `serve` end soon: see `HttpServer`."""
        for server in self._servers:
            server.should_exit = True
