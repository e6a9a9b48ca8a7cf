"""Every way in which a client can leave, and every moment at which it can do so."""

import contextlib
import socket
from collections.abc import Callable, Iterator

import pytest

from tidegate_engine.server.intake import ENCODE_INLINE_CHARS
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import (
    HeldTokenizer,
    RunningEngine,
    a_keyed_tenant,
    a_running_engine,
    a_served_model,
)
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_completion, a_head, a_raw_request, connect, reset


def close(connection: socket.socket) -> None:
    connection.close()


def close_one_way(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


WAYS = (close, reset, close_one_way)


@pytest.fixture
def engine() -> Iterator[RunningEngine]:
    with a_running_engine(step_seconds=0.001) as running:
        yield running
        check_empty(running)


def check_empty(engine: RunningEngine) -> None:
    """Nothing is left of any request, anywhere."""
    generations = engine.service.generations
    eventually(lambda: not generations.running_ids and engine.is_idle(), "an empty engine")
    eventually(lambda: not generations._leaving, "nobody who leaves")
    assert not generations._by_request
    assert not engine.service.engine._live
    stats = engine.stats()
    assert stats.scheduler.kv_used_blocks == stats.scheduler.host_used_blocks == 0
    assert stats.tokens_after_cancel == 0
    totals = stats.scheduler.tenants.values()
    assert stats.scheduler.arrivals == sum(t.finished + t.cancelled for t in totals)
    assert sum(stats.cancelled.values()) == sum(t.cancelled for t in totals)


def cancelled(engine: RunningEngine, state: str) -> int:
    """Count those who hung up."""
    return sum(
        count
        for key, count in engine.stats().cancelled.items()
        if (key.cause.value, key.state) == ("disconnect", state)
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", WAYS)
def test_a_client_leaves_by_closing_by_a_reset_or_by_closing_one_way(
    engine: RunningEngine, leave: Callable[[socket.socket], None], *, stream: bool
) -> None:
    with a_raw_request(engine.port, stream=stream, n=2) as connection:
        eventually(lambda: engine.stats().scheduler.running == 2, "running choices")
        leave(connection)
        eventually(lambda: cancelled(engine, "running") == 2, "the end of both")


@pytest.mark.parametrize("leave", WAYS)
def test_a_client_that_leaves_between_head_and_body_asks_for_nothing(
    engine: RunningEngine, leave: Callable[[socket.socket], None], caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(engine.port)
    connection.sendall(a_head(1000) + b'{"model":')
    assert engine.http().get("/healthz").status_code == 200
    leave(connection)
    with connection:
        check_empty(engine)
    assert engine.stats().scheduler.arrivals == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", WAYS)
def test_a_client_that_leaves_before_the_engine_has_its_request_gets_no_step(
    leave: Callable[[socket.socket], None], *, stream: bool
) -> None:
    with a_running_engine(a_snapshot(a_keyed_tenant(), a_keyed_tenant("zeta"))) as engine:
        with a_raw_request(engine.port, tenant="zeta"):
            eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
            engine.gate.shut()
            with a_raw_request(engine.port, stream=stream) as connection:
                generations = engine.service.generations
                eventually(lambda: len(generations.running_ids) == 2, "a submitted request")
                leave(connection)
                eventually(lambda: len(generations.running_ids) == 1, "its end")
            engine.gate.open()
            acme = engine.stats().scheduler.tenants["acme"]
            assert (acme.cancelled, acme.prompt_tokens, acme.output_tokens) == (1, 0, 0)
            assert cancelled(engine, "waiting") == 1
        check_empty(engine)


@pytest.mark.parametrize("leave", WAYS)
def test_a_client_that_leaves_while_its_prompt_is_encoded_gets_no_step(
    leave: Callable[[socket.socket], None],
) -> None:
    tokenizer = HeldTokenizer()
    with a_running_engine(model=a_served_model(tokenizer=tokenizer)) as engine:
        prompt = "x" * (ENCODE_INLINE_CHARS + 1)
        with a_raw_request(engine.port, prompt=prompt) as connection:
            assert tokenizer.begun.wait(timeout=10)
            leave(connection)
            # The event loop has seen the end of that connection once it has served a later one.
            assert engine.http().get("/healthz").status_code == 200
            tokenizer.released.set()
            check_empty(engine)
        assert engine.stats().scheduler.arrivals == 0


def test_a_second_request_before_the_first_answer_ends_both(engine: RunningEngine) -> None:
    """Else nobody would see the client leave: it would be served to the end."""
    with connect(engine.port) as connection:
        connection.sendall(a_completion(stream=False))
        eventually(lambda: engine.stats().scheduler.running == 1, "a running request")
        connection.sendall(a_completion(stream=False))
        eventually(lambda: cancelled(engine, "running") == 1, "its end")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        assert engine.stats().scheduler.arrivals == 1


def test_requests_one_after_the_other_share_a_connection(engine: RunningEngine) -> None:
    with connect(engine.port) as connection:
        for _ in range(3):
            connection.sendall(a_completion(max_tokens=2))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_after_a_client_leaves_a_long_prompt_is_read_no_further_than_its_chunk() -> None:
    with a_running_engine() as engine:
        engine.gate.let_one_pass()  # none is held yet: the first will be
        with a_raw_request(engine.port, prompt="x" * 3000):
            eventually(lambda: engine.gate.is_holding, "the first chunk")
        eventually(lambda: not engine.service.generations.running_ids, "the client's end")
        engine.gate.open()
        check_empty(engine)
        acme = engine.stats().scheduler.tenants["acme"]
        assert (acme.prompt_tokens, acme.output_tokens) == (256, 0)
