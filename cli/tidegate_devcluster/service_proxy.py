"""One loopback port per Service, spread over its ready endpoints: kube-proxy in user space."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tidegate_devcluster.api import Change, Json, KubernetesApi, Listing
from tidegate_devcluster.tcp import Connection, join

SERVICE_LABEL = "kubernetes.io/service-name"
ENDPOINT_SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
CONNECT_SECONDS = 5.0

Address = tuple[str, int]


@dataclass
class _Service:
    """A Service's slices by name, and the connections through its port."""

    slices: dict[str, Json] = field(default_factory=dict)
    open_connections: dict[Address, int] = field(default_factory=dict)
    last_used: dict[Address, int] = field(default_factory=dict)
    num_connections: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class ServiceProxy:
    """Forwards TCP connections to the pods of Services; an async context manager.

    A connection goes to the ready address with the fewest open ones, among equals to the one
    whose last connection is oldest. Without a ready address it waits for one, up to a bound,
    and is closed then. Bytes pass as they come, in both directions; the end of one direction is
    passed on as such, and a reset as a reset of the whole connection.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *,
        resolve: Callable[[str, int], Address] = lambda ip, port: (ip, port),
        wait_seconds: float = 5.0,
    ) -> None:
        """Takes a kubeconfig that may read EndpointSlices.

        Args:
            kubeconfig: Of any user who may list and watch EndpointSlices.
            resolve: Where this machine reaches an endpoint (`ProcessKubelet.endpoint`).
            wait_seconds: How long a connection waits for a ready address.
        """
        self._kubeconfig = kubeconfig
        self._resolve = resolve
        self._wait_seconds = wait_seconds
        self._services: dict[tuple[str, str], _Service] = {}
        self._addresses: dict[tuple[str, str, str | None], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> ServiceProxy:
        async with AsyncExitStack() as exits:
            self._api = await exits.enter_async_context(KubernetesApi(self._kubeconfig))
            exits.push_async_callback(self._stop)
            self._spawn(self._follow_slices())
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._exits.aclose()

    def address(self, namespace: str, service: str, port: str | None = None) -> str:
        """Returns "127.0.0.1:PORT" of a Service, the same each time; the Service may come later.

        Must be called in the proxy's event loop.

        Args:
            namespace: The Service's namespace.
            service: Its name.
            port: Name of the Service's port; its first without.
        """
        key = (namespace, service, port)
        if key not in self._addresses:
            listener = socket.create_server(("127.0.0.1", 0))
            listener.setblocking(False)  # noqa: FBT003 - positional only
            self._addresses[key] = "127.0.0.1:{1}".format(*listener.getsockname())
            self._spawn(self._accept(listener, self._service(namespace, service), port))
        return self._addresses[key]

    async def _accept(self, listener: socket.socket, service: _Service, port: str | None) -> None:
        with listener:
            while True:
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
                self._spawn(self._serve(accepted, service, port))

    async def _serve(self, accepted: socket.socket, service: _Service, port: str | None) -> None:
        reader, writer = await asyncio.open_connection(sock=accepted)
        try:
            with suppress(TimeoutError, OSError):
                await self._forward(reader, writer, service, port)
        finally:
            writer.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        service: _Service,
        port: str | None,
    ) -> None:
        address, backend = await self._connect(service, port)
        try:
            await join((reader, writer), backend)
        finally:
            backend[1].transport.abort()
            service.open_connections[address] -= 1

    async def _connect(self, service: _Service, port: str | None) -> tuple[Address, Connection]:
        refused: set[Address] = set()
        async with asyncio.timeout(self._wait_seconds):
            while True:
                address = await self._choose(service, port, refused)
                # Counted before it is open, so that a burst spreads.
                _count(service, address)
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        return address, await asyncio.open_connection(*self._resolve(*address))
                except (OSError, TimeoutError):
                    refused.add(address)
                    service.open_connections[address] -= 1
                except BaseException:
                    service.open_connections[address] -= 1
                    raise

    async def _choose(self, service: _Service, port: str | None, refused: set[Address]) -> Address:
        async with service.changed:
            while True:
                ready = [
                    address
                    for address in _ready_addresses(service.slices.values(), port)
                    if address not in refused
                ]
                if ready:
                    return min(
                        ready,
                        key=lambda address: (
                            service.open_connections.get(address, 0),
                            service.last_used.get(address, 0),
                            address,
                        ),
                    )
                await service.changed.wait()
                # The slices are news: who refused before may serve now.
                refused.clear()

    async def _follow_slices(self) -> None:
        async for news in self._api.follow(ENDPOINT_SLICES):
            if isinstance(news, Listing):
                for service in self._services.values():
                    service.slices.clear()
                for item in news.items:
                    self._take(Change(item, is_gone=False))
            else:
                self._take(news)
            for service in list(self._services.values()):
                async with service.changed:
                    service.changed.notify_all()

    def _take(self, change: Change) -> None:
        metadata = change.item["metadata"]
        name = metadata.get("labels", {}).get(SERVICE_LABEL)
        if name is None:
            return
        slices = self._service(metadata["namespace"], name).slices
        if change.is_gone:
            slices.pop(metadata["name"], None)
        else:
            slices[metadata["name"]] = change.item

    def _service(self, namespace: str, name: str) -> _Service:
        return self._services.setdefault((namespace, name), _Service())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _count(service: _Service, address: Address) -> None:
    service.num_connections += 1
    service.last_used[address] = service.num_connections
    service.open_connections[address] = service.open_connections.get(address, 0) + 1


def _ready_addresses(slices: Iterable[Json], port: str | None) -> list[Address]:
    """Returns the addresses that may take new connections, without repetition."""
    found: dict[Address, None] = {}
    for endpoint_slice in slices:
        numbers = [
            declared["port"]
            for declared in endpoint_slice.get("ports") or ()
            if port is None or declared.get("name") == port
        ]
        for endpoint in endpoint_slice.get("endpoints") or ():
            # A missing condition counts as ready, says the API.
            if numbers and endpoint.get("conditions", {}).get("ready", True):
                found.update({(ip, numbers[0]): None for ip in endpoint["addresses"]})
    return list(found)
