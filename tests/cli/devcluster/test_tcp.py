from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from tidegate_devcluster.processes import free_port
from tidegate_devcluster.tcp import Connection, forwarded


class Backend:
    """Echoes what it gets in capitals once its caller has ended; notes how connections ended."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        try:
            received = await reader.read()
        except ConnectionResetError:
            self.ends.put_nowait("reset")
        else:
            writer.write(received.upper())
            self.ends.put_nowait("end")
        writer.close()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
async def address(backend: Backend) -> AsyncIterator[tuple[str, int]]:
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
    source = ("127.0.0.1", free_port())
    async with server, forwarded(source, server.sockets[0].getsockname()):
        yield source


async def connect(address: tuple[str, int]) -> Connection:
    reader, writer = await asyncio.open_connection(*address)
    # Sent without being asked: nothing may be held back until more comes.
    assert await reader.readline() == b"hello\n"
    return reader, writer


async def test_one_direction_may_end_before_the_other(address: tuple[str, int]) -> None:
    reader, writer = await connect(address)

    writer.write(b"question")
    writer.write_eof()

    assert await reader.read() == b"QUESTION"
    writer.close()


async def test_a_caller_that_leaves_ends_the_connection_to_the_backend(
    address: tuple[str, int], backend: Backend
) -> None:
    _, writer = await connect(address)

    writer.close()

    assert await asyncio.wait_for(backend.ends.get(), 2.0) == "end"


async def test_a_reset_reaches_the_backend(address: tuple[str, int], backend: Backend) -> None:
    _, writer = await connect(address)

    # Closing with a linger of zero seconds sends a reset instead of an end.
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

    assert await asyncio.wait_for(backend.ends.get(), 2.0) in {"reset", "end"}


async def test_nothing_is_served_after_the_context(backend: Backend) -> None:
    server = await asyncio.start_server(backend.serve, "127.0.0.1", 0)
    source = ("127.0.0.1", free_port())
    async with server:
        async with forwarded(source, server.sockets[0].getsockname()):
            reader, writer = await connect(source)
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*source)
        assert await _ended(reader)
        writer.close()


async def _ended(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True
