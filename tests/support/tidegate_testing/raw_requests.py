"""Requests written to a socket by hand: for clients that hang up, stall or break off."""

import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tidegate_testing.engines import MODEL, key_of

ENDLESS = 15_000
"""Tokens that nobody waits for; three such requests are expected to fit an engine of tests."""


def a_head(length: int, *, tenant: str = "acme", more: str = "") -> bytes:
    """Return the head of a completion request with a body of `length` bytes."""
    return (
        "POST /v1/completions HTTP/1.1\r\nhost: engine\r\n"
        f"authorization: Bearer {key_of(tenant)}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n{more}\r\n"
    ).encode()


def a_completion(*, tenant: str = "acme", **fields: object) -> bytes:
    """Return a whole completion request."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": ENDLESS, **fields}
    content = json.dumps(body).encode()
    return a_head(len(content), tenant=tenant) + content


def connect(port: int, *, receive_buffer: int | None = None) -> socket.socket:
    """Connect to an engine of this machine."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", port))
    return connection


@contextmanager
def a_raw_request(
    port: int, *, tenant: str = "acme", receive_buffer: int | None = None, **fields: object
) -> Iterator[socket.socket]:
    """Send a completion request; leaving the block hangs up."""
    with connect(port, receive_buffer=receive_buffer) as connection:
        connection.sendall(a_completion(tenant=tenant, **fields))
        yield connection


def reset(connection: socket.socket) -> None:
    """Hang up by a reset instead of an orderly end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def read_to_the_end(connection: socket.socket) -> bytes:
    """Read until the other side closes."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def read_events(connection: socket.socket) -> bytes:
    """Read a whole event stream, of a connection that is kept open behind it."""
    text = b""
    while not text.endswith(b"\r\n0\r\n\r\n"):
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionError(f"the stream broke off behind {text[-200:]!r}")
        text += part
    return text
