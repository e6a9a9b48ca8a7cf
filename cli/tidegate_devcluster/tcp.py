"""TCP connections joined to each other, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

PIECE_BYTES = 65536


@asynccontextmanager
async def forwarded(source: tuple[str, int], target: tuple[str, int]) -> AsyncIterator[None]:
    """Serves the source address by connections to the target for as long as the context lasts."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                backend = await asyncio.open_connection(*target)
                try:
                    await join((reader, writer), backend)
                finally:
                    backend[1].transport.abort()
        finally:
            writer.transport.abort()

    open_ones: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        open_ones.add(task)
        task.add_done_callback(open_ones.discard)

    server = await asyncio.start_server(accept, *source)
    try:
        yield
    finally:
        server.close()
        tasks = list(open_ones)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def join(one: Connection, other: Connection) -> None:
    """Passes bytes both ways until both directions have ended or one has broken."""
    ways = [
        asyncio.create_task(_pass_on(one[0], other[1])),
        asyncio.create_task(_pass_on(other[0], one[1])),
    ]
    try:
        # The first break ends both; an end passes on as an end, and the other way goes on.
        await asyncio.gather(*ways)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.write_eof()
    await writer.drain()
