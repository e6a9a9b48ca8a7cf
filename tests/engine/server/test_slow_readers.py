"""Who reads slowly is waited for; who reads nothing costs little, and not for long."""

import asyncio
import contextlib
import math
import socket
import time

import psutil
import pytest

from tidegate_engine.core.plan import SampledToken
from tidegate_engine.core.request import TokenOutput
from tidegate_engine.server.connections import listen
from tidegate_engine.server.generation import LEAST_UNREAD_TOKENS, Choice, Generation
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_completion, a_raw_request, connect, read_events

MANY = 4000
"""Tokens that overflow what the two sides' sockets hold."""


def num_slow(engine: RunningEngine) -> int:
    return sum(
        count for key, count in engine.stats().cancelled.items() if key.cause.value == "slow_reader"
    )


def is_connected(engine: RunningEngine, client: socket.socket) -> bool:
    """Whether the engine's side of a connection is there."""
    client_port = client.getsockname()[1]
    return any(
        (connection.laddr[1:], connection.raddr[1:]) == ((engine.port,), (client_port,))
        for connection in psutil.Process().net_connections("tcp")
    )


def test_who_leaves_too_much_unread_finds_an_error_behind_it() -> None:
    with (
        a_running_engine(max_unread_events=64) as engine,
        a_raw_request(engine.port, stream=True, receive_buffer=4096) as reader,
    ):
        eventually(lambda: num_slow(engine) == 1, "the end of the slow reader's request")
        assert engine.stats().scheduler.kv_used_blocks == 0
        events = read_events(reader)
        assert events.count(b'"code":"slow_reader"') == 1
        assert b"[DONE]" not in events
        assert b'"finish_reason":"' not in events


def test_who_reads_slowly_but_steadily_gets_everything() -> None:
    with (
        a_running_engine(listener=listen("127.0.0.1", 0, unread_seconds=1)) as engine,
        connect(engine.port, receive_buffer=16_384) as reader,
    ):
        began = time.monotonic()
        reader.sendall(a_completion(stream=True, max_tokens=MANY))
        events = b""
        while not events.endswith(b"\r\n0\r\n\r\n"):
            events += reader.recv(2048)
            time.sleep(0.003)  # that is what it is to be slow
        assert time.monotonic() - began > 1
        assert events.count(b"data: {") == MANY
        assert b'"finish_reason":"length"' in events
        assert num_slow(engine) == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cancel_on_disconnect", [True, False])
def test_who_reads_nothing_of_a_complete_answer_is_forgotten_after_a_while(
    *, stream: bool, cancel_on_disconnect: bool
) -> None:
    policy = a_snapshot(a_keyed_tenant(cancel_on_disconnect=cancel_on_disconnect))
    listener = listen("127.0.0.1", 0, unread_seconds=1)
    with (
        a_running_engine(policy, listener=listener) as engine,
        connect(engine.port, receive_buffer=4096) as reader,
    ):
        # Whole answers have fewer bytes a token: logprobs make up for it.
        reader.sendall(a_completion(stream=stream, max_tokens=MANY, logprobs=1))
        eventually(lambda: engine.stats().scheduler.arrivals == 1, "its arrival")
        eventually(engine.is_idle, "its last token")
        eventually(lambda: not engine.service.generations.running_ids, "the end of its answer")
        eventually(lambda: not is_connected(engine, reader), "the end of its connection")


def test_what_is_left_unread_is_bounded_with_its_logprobs() -> None:
    generation = Generation("one", tenant="acme", arrived_at=0.0, max_unread_events=1000)
    token = SampledToken(1, -0.1, tuple((i, -0.1) for i in range(19)))
    num_taken = 0
    while not generation.is_full:
        generation.put(0, TokenOutput("one.0", token))
        num_taken += 1
    assert num_taken == 1000 // 20


@pytest.mark.parametrize("stream", [True, False])
def test_many_choices_at_once_are_no_slow_reader(*, stream: bool) -> None:
    with a_running_engine(max_unread_events=1) as engine:
        body = {
            "model": MODEL,
            "prompt": "Hello",
            "n": 16,
            "max_tokens": LEAST_UNREAD_TOKENS - 1,
            "stream": stream,
        }
        answer = engine.http().post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert "slow_reader" not in answer.text
        assert answer.text.count('"finish_reason":"length"') == 16


def test_nobody_reads_a_whole_answer_slowly() -> None:
    with a_running_engine(max_unread_events=1) as engine:
        body = {"model": MODEL, "prompt": "Hello", "n": 16, "max_tokens": MANY // 16}
        assert engine.http().post("/v1/completions", json=body).status_code == 200


async def test_log_probabilities_that_were_left_unread_come_a_piece_at_a_time() -> None:
    generation = Generation("one", tenant="acme", arrived_at=0.0, max_unread_events=math.inf)
    token = SampledToken(1, -0.1, tuple((i, -0.1) for i in range(20)))
    for _ in range(100):
        generation.put(0, TokenOutput("one.0", token))
    sizes = [len(outputs) async for outputs in generation.outputs()]
    assert sizes == [49, 49, 2]  # 49 * 21 events are the first to be 1024


async def test_others_get_their_turn_between_the_pieces() -> None:
    generation = Generation("one", tenant="acme", arrived_at=0.0, max_unread_events=math.inf)
    for _ in range(600):
        generation.put(0, TokenOutput("one.0", SampledToken(1)))
    others_turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(others_turn.set)
    assert [others_turn.is_set() async for _ in generation.outputs()] == [False, True, True]


async def test_what_was_left_unread_is_rendered_a_piece_at_a_time() -> None:
    generation = Generation("one", tenant="acme", arrived_at=0.0, max_unread_events=5000)
    generation.live[0] = Choice(0, "one.0", generation)
    for _ in range(600):
        generation.put(0, TokenOutput("one.0", SampledToken(1)))
    del generation.live[0]
    sizes = [len(outputs) async for outputs in generation.outputs()]
    assert sizes == [256, 256, 88]
    assert not generation.is_full


def test_connections_hold_little_for_who_does_not_read() -> None:
    with listen("127.0.0.1", 0) as listener, connect(listener.getsockname()[1]):
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(0.0)
            num_sent = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    num_sent += accepted.send(bytes(4096))
            # Linux doubles what it is asked for, and the reader's side takes some.
            assert 0 < num_sent < 1_000_000
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
