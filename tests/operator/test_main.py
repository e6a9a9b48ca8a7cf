import asyncio
import gc
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import kopf
import pytest
import uvloop
from kopf._cogs.aiokits import aiotoggles
from kopf._cogs.clients import watching

from tidegate_operator.main import tell_of_loop

WATCHERS = 30
"""Each complains in about half of all cases."""

MOMENTS = 6
"""Turns of the event loop that an opening takes, and one more."""


async def leave_watches_open() -> None:
    """Cancel watchers as kopf does, each while it hands on an event."""

    paused = aiotoggles.ToggleSet(any)
    resource = kopf.Resource("tidegate.io", "v1alpha1", "tenantpolicies")

    async def watcher() -> None:
        # In a variable as in kopf: the frame of what was cancelled keeps it.
        stream = watching.infinite_watch(
            settings=kopf.OperatorSettings(),
            resource=resource,
            namespace=None,
            operator_paused=paused,
        )
        async for _ in stream:
            await asyncio.Event().wait()

    watchers = [asyncio.create_task(watcher()) for _ in range(WATCHERS)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for one in watchers:
        one.cancel()
    await asyncio.wait(watchers)
    raise ConnectionError("as long as this is known, so are their frames")


async def events(**_: object) -> AsyncIterator[Any]:
    while True:
        yield {"type": "MODIFIED", "object": {}}


@pytest.mark.parametrize("is_told", [True, False])
def test_watches_that_kopf_leaves_open_end_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    monkeypatch.setattr(watching, "continuous_watch", events)

    async def run() -> None:
        if not is_told:
            asyncio.get_running_loop().set_exception_handler(tell_of_loop)
        await leave_watches_open()

    with caplog.at_level(logging.INFO), pytest.raises(ConnectionError):
        asyncio.run(run())
    # Once this is not told any more, kopf closes them, and the handler has no use.
    assert ("generator didn't stop after athrow()" in caplog.text) is is_told


async def give_up_connections() -> None:
    """Give connections up at each moment of their opening, of which one leaves an error."""
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        for moment in range(MOMENTS):
            with socket.create_connection(server.getsockname()) as client:
                server.accept()[0].close()
                opening = asyncio.ensure_future(
                    loop.create_connection(
                        asyncio.Protocol, sock=client, ssl=context, server_hostname="closed.test"
                    )
                )
                for _ in range(moment):
                    await asyncio.sleep(0)
                opening.cancel()
                await asyncio.wait([opening])
    gc.collect()


@pytest.mark.parametrize("is_told", [True, False])
def test_connections_that_are_given_up_leave_no_word(
    caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    async def run() -> None:
        if not is_told:
            asyncio.get_running_loop().set_exception_handler(tell_of_loop)
        await give_up_connections()

    with caplog.at_level(logging.INFO):
        uvloop.run(run())
    # Once this is not told any more, uvloop listens itself, and the handler has no use.
    assert ("never retrieved" in caplog.text) is is_told


async def test_a_task_that_ends_by_a_connection_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise ConnectionResetError("nobody is there")

    asyncio.get_running_loop().set_exception_handler(tell_of_loop)
    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    del task
    gc.collect()
    assert "nobody is there" in caplog.text


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_tls_would_send_over_a_closed_connection_is_not_told(
    caplog: pytest.LogCaptureFixture, *, is_closed: bool
) -> None:
    async def complain() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            host, port = server.getsockname()
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
            if is_closed:
                transport.close()
            complaint = {"message": "Fatal error on SSL protocol", "transport": transport}
            tell_of_loop(loop, {**complaint, "exception": RuntimeError("the handler is closed")})
            transport.close()

    with caplog.at_level(logging.INFO):
        uvloop.run(complain())
    assert ("Fatal error" not in caplog.text) is is_closed


async def test_other_complaints_of_the_loop_are_told(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    tell_of_loop(loop, {"message": "a callback failed", "exception": ValueError("x")})
    assert "a callback failed" in caplog.text
