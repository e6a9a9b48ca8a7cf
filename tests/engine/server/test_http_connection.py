"""What a connection may send that is no request, or not for this server: bounded, and told."""

import asyncio
import contextlib
import gc
import json
import logging
import socket
from collections.abc import Callable, Iterator

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tidegate_engine.server import http_connection
from tidegate_engine.server.connections import HttpServer, listen
from tidegate_engine.server.http_connection import MAX_HEAD_BYTES
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_running_engine
from tidegate_testing.raw_requests import (
    a_completion,
    a_head,
    a_raw_request,
    connect,
    read_to_the_end,
)

START = b"GET /healthz HTTP/1.1\r\nhost: engine\r\n"
ENDLESS_HEADS = {
    "one long value": START + b"a: " + b"x" * 2 * MAX_HEAD_BYTES,
    "one long name": START + b"x" * 2 * MAX_HEAD_BYTES,
    "many headers": START + b"a: xyz\r\n" * (MAX_HEAD_BYTES // 4),
    "many short headers": START + b"a:\r\n" * (MAX_HEAD_BYTES // 2),
    "a long path": b"GET /" + b"x" * 2 * MAX_HEAD_BYTES,
}
H2C = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING):
        yield caplog


def pieces(sent: bytes, size: int) -> Iterator[bytes]:
    return (sent[start : start + size] for start in range(0, len(sent), size))


def check_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n")[1:])
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    assert headers["x-tidegate-reason"] == code
    assert headers["x-request-id"]
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == (code, "invalid_request_error")


def check_answered(connection: socket.socket) -> bytes:
    answer = connection.recv(1 << 16)
    while not answer.endswith(b"}"):
        more = connection.recv(1 << 16)
        assert more, answer
        answer += more
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return answer


def check_is_cut(connection: socket.socket) -> None:
    connection.settimeout(5)
    try:
        assert read_to_the_end(connection) == b""
    except ConnectionResetError:
        return


def plainly(content: bytes) -> bytes:
    return a_head(len(content)) + content


def chunked(*chunks: bytes, trailer: bytes = b"\r\n") -> bytes:
    head = a_head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + body + b"0\r\n" + trailer


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("head", ENDLESS_HEADS.values(), ids=ENDLESS_HEADS)
def test_a_head_that_is_too_long_is_refused_whether_it_ends_or_not(
    engine: RunningEngine, head: bytes, end: bytes
) -> None:
    with connect(engine.port) as hostile:
        hostile.sendall(head + end)
        check_refused(read_to_the_end(hostile), 431, "headers_too_large")


def test_a_refusal_reaches_a_client_that_has_sent_much_behind_its_cause(
    engine: RunningEngine,
) -> None:
    with connect(engine.port) as hostile:
        hostile.sendall(START + b"a: " + b"x" * 1_000_000)
        check_refused(read_to_the_end(hostile), 431, "headers_too_large")
        # Who reads first may go on sending, until it knows that nobody listens.
        for _ in range(3):
            hostile.sendall(b"x" * 1000)


def test_a_client_that_does_not_hang_up_after_its_refusal_is_cut(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "LINGER_SECONDS", 0.2)
    with connect(engine.port) as hostile:
        hostile.sendall(b"no HTTP\r\n\r\n")
        check_refused(read_to_the_end(hostile), 400, "invalid_http")
        eventually(lambda: is_cut(hostile), "the connection to be cut")


def is_cut(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False


def test_a_head_without_an_end_is_cut_long_before_it_is_large(engine: RunningEngine) -> None:
    with connect(engine.port) as hostile:
        hostile.sendall(START + b"a: ")
        # What the buffers of both sockets hold, and much more.
        assert num_taken(hostile, 100_000_000) < 30_000_000


def num_taken(connection: socket.socket, num_bytes: int) -> int:
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < num_bytes:
            connection.sendall(b"x" * 100_000)
            sent += 100_000
    return sent


@pytest.mark.parametrize("size", [MAX_HEAD_BYTES, 5000])
def test_a_head_of_the_length_that_is_allowed_is_read(engine: RunningEngine, size: int) -> None:
    head = START + b"a: "
    head += b"x" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n"
    with connect(engine.port) as client:
        for _ in range(2):
            for piece in pieces(head, size):
                client.sendall(piece)
            check_answered(client)


def test_a_trailer_without_an_end_is_refused(engine: RunningEngine) -> None:
    sent = chunked(b"{}", trailer=b"a: " + b"x" * 2 * MAX_HEAD_BYTES)
    with connect(engine.port) as hostile:
        hostile.sendall(sent)
        check_refused(read_to_the_end(hostile), 431, "headers_too_large")


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_body_in_many_chunks_with_a_trailer_is_read(engine: RunningEngine, size: int) -> None:
    content = a_completion(max_tokens=1).partition(b"\r\n\r\n")[2] + b" " * 40_000 * min(size, 3)
    trailer = b"a: b\r\n\r\n"
    with connect(engine.port) as client:
        for piece in pieces(chunked(*pieces(content, size), trailer=trailer), 50_000):
            client.sendall(piece)
        check_answered(client)


def test_fields_of_a_trailer_do_not_pass_for_headers(engine: RunningEngine) -> None:
    content = a_completion(max_tokens=1).partition(b"\r\n\r\n")[2]
    with connect(engine.port) as client:
        client.sendall(chunked(content, trailer=b"x-request-id: of-the-trailer\r\n\r\n"))
        assert b"of-the-trailer" not in check_answered(client)


@pytest.mark.parametrize("size", [1 << 16, 11, 1])
@pytest.mark.parametrize("framed", [plainly, chunked])
def test_an_upgrade_is_passed_over_and_the_body_read(
    engine: RunningEngine,
    logged: pytest.LogCaptureFixture,
    size: int,
    framed: Callable[[bytes], bytes],
) -> None:
    content = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
    sent = framed(content).replace(b"host: engine\r\n", b"host: engine\r\n" + H2C.encode())
    with connect(engine.port) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for piece in pieces(sent, size):
                client.sendall(piece)
            check_answered(client)
    assert not logged.records


@pytest.mark.parametrize("end", ["", "connection: close, upgrade\r\n"])
def test_an_upgrade_without_a_body_is_passed_over(engine: RunningEngine, end: str) -> None:
    sent = START + f"{end}connection: upgrade\r\nupgrade: websocket\r\n\r\n".encode()
    with connect(engine.port) as client:
        client.sendall(sent)
        check_answered(client)
        if end:
            check_is_cut(client)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT engine:80 HTTP/1.1\r\nhost: engine:80\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        a_head(2, more="content-length: 3\r\n"),
        chunked().replace(b"\r\n0\r\n", b"\r\nno number\r\n"),
    ],
)
def test_what_is_no_http_is_told_so_in_an_error_object_and_not_logged(
    engine: RunningEngine, logged: pytest.LogCaptureFixture, sent: bytes
) -> None:
    with connect(engine.port) as client:
        client.sendall(sent)
        check_refused(read_to_the_end(client), 400, "invalid_http")
    assert not logged.records


def test_a_stream_whose_sender_goes_on_with_no_http_is_cancelled() -> None:
    with (
        a_running_engine(step_seconds=0.001) as engine,
        a_raw_request(engine.port, stream=True) as client,
    ):
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(b"\x00\x01")
        eventually(engine.is_idle, "the stream to be cancelled")
        assert b"invalid_http" not in read_until_cut(client)


async def test_an_answer_that_has_begun_is_broken_off_and_not_mixed_with_an_error() -> None:
    async def answer_early(_: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    listener = listen("127.0.0.1", 0)
    server = HttpServer(answer_early)
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    assert await reader.readexactly(5) == b"begun"
    writer.write(b"no number\r\n")
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()
    server.should_exit = True
    await serving


def test_idle_connections_are_kept_for_longer_than_gateways_keep_theirs() -> None:
    async def unused(_scope: Scope, _receive: Receive, _send: Send) -> None: ...

    assert HttpServer(unused).config.timeout_keep_alive > 60


def read_until_cut(connection: socket.socket) -> bytes:
    try:
        return read_to_the_end(connection)
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("num_blanks", [1, 3])
def test_blank_lines_after_an_answer_keep_no_connection_open(num_blanks: int) -> None:
    with (
        a_running_engine(http_options={"request_seconds": 0.2}) as engine,
        connect(engine.port) as idle,
    ):
        idle.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        idle.sendall(START + b"\r\n")
        check_answered(idle)
        for _ in range(num_blanks):
            idle.sendall(b"\r\n")
        check_is_cut(idle)


def test_a_body_after_its_refusal_keeps_no_connection_open() -> None:
    with (
        a_running_engine(http_options={"request_seconds": 0.2}) as engine,
        connect(engine.port) as idle,
    ):
        idle.sendall(a_head(2, tenant="nobody"))
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 401")
        idle.sendall(b"{}")
        check_is_cut(idle)


def test_what_came_of_a_refused_body_is_not_kept(engine: RunningEngine) -> None:
    with connect(engine.port) as idle:
        idle.sendall(a_head(50_000, tenant="nobody") + b" " * 40_000)
        assert idle.recv(1 << 16).startswith(b"HTTP/1.1 401")
        kept = [found for found in gc.get_objects() if type(found) is RequestResponseCycle]
        assert kept
        assert not any(cycle.body for cycle in kept)
