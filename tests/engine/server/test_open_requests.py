"""What requests with bodies may take together, and what one tenant can take from the others."""

import json
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from tidegate_engine.server.open_requests import EngineOverloadedError, OpenBodies
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_completion, a_head, a_raw_request, connect

SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
SMALL = {"max_body_bytes": 80_000}


def two_tenants_on_a_slow_engine() -> dict[str, object]:
    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    return {"policy": policy, "step_seconds": 0.001}


def status_of(engine: RunningEngine, tenant: str, *, padding: int = 0) -> int:
    content = json.dumps(SHORT) + " " * padding
    headers = {"content-type": "application/json"}
    return engine.http(tenant).post("/v1/completions", content=content, headers=headers).status_code


def test_whoever_takes_what_is_to_be_had_leaves_half_and_two_a_third() -> None:
    bodies = OpenBodies(90)
    for _ in range(45):
        bodies.hold("one", 1)
    with pytest.raises(EngineOverloadedError):
        bodies.hold("one", 1)
    bodies.release("one", 15)
    bodies.hold("two", 30)
    for owner in ("one", "two"):
        with pytest.raises(EngineOverloadedError):
            bodies.hold(owner, 1)
    bodies.hold("three", 15)
    with pytest.raises(EngineOverloadedError):
        bodies.hold("three", 1)
    bodies.hold("three", 0)


def test_what_is_given_back_can_be_had_again() -> None:
    bodies = OpenBodies(10)
    for _ in range(3):
        bodies.hold("one", 5)
        with pytest.raises(EngineOverloadedError):
            bodies.hold("one", 1)
        bodies.release("one", 5)
    assert not bodies._held
    assert not bodies._total


def test_bodies_that_are_announced_and_do_not_come_keep_nobody_out() -> None:
    with a_running_engine(http_options=SMALL) as engine, ExitStack() as clients:
        for _ in range(8):
            silent = clients.enter_context(connect(engine.port))
            silent.sendall(a_head(79_000, more="expect: 100-continue\r\n"))
            # Told to go on: the engine waits for the body.
            assert silent.recv(100).startswith(b"HTTP/1.1 100")
        assert status_of(engine, "acme", padding=20_000) == 200


def test_a_body_of_unknown_length_counts_as_what_came_of_it() -> None:
    head = a_head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    content = a_completion(stream=True).partition(b"\r\n\r\n")[2]
    with (
        a_running_engine(step_seconds=0.001, http_options=SMALL) as engine,
        ExitStack() as clients,
    ):
        for _ in range(10):
            honest = clients.enter_context(connect(engine.port))
            honest.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
        eventually(lambda: len(engine.service.generations.running_ids) == 10, "ten answers")
        assert status_of(engine, "acme", padding=20_000) == 200


def test_a_tenant_whose_bodies_fill_its_share_is_refused_and_others_are_served() -> None:
    with (
        a_running_engine(**two_tenants_on_a_slow_engine(), http_options=SMALL) as engine,  # type: ignore[arg-type]
        ExitStack() as clients,
    ):
        for _ in range(3):
            clients.enter_context(a_raw_request(engine.port, user="x" * 10_000))
        eventually(lambda: len(engine.service.generations.running_ids) == 3, "three answers")
        refused = engine.http().post("/v1/completions", json={**SHORT, "user": "x" * 10_000})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-request-id"]
        assert status_of(engine, "acme") == 200
        assert status_of(engine, "zeta", padding=15_000) == 200
        clients.close()
        eventually(engine.is_idle, "an idle engine")
        eventually(lambda: status_of(engine, "acme", padding=35_000) == 200, "all to be free")


def test_a_body_that_breaks_off_is_given_back() -> None:
    with a_running_engine(http_options=SMALL) as engine:
        for _ in range(3):
            with connect(engine.port) as broken:
                broken.sendall(a_head(39_000) + b" " * 35_000)
                broken.shutdown(socket.SHUT_WR)
                broken.recv(1)
        eventually(lambda: status_of(engine, "acme", padding=35_000) == 200, "all to be free")


LONG: dict[str, Any] = {**SHORT, "max_tokens": 750, "n": 16, "logprobs": 1, "ignore_eos": True}


def read_answer(connection: socket.socket) -> bytes:
    """Read a whole answer, of a connection that is kept open behind it."""
    head, _, body = b"", b"", b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(1024)
    head, _, body = head.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return body


def test_long_answers_that_nobody_reads_count_until_they_are_read() -> None:
    policy = a_snapshot(a_keyed_tenant("acme"), a_keyed_tenant("zeta"))
    with (
        a_running_engine(policy, http_options={"max_body_bytes": 1_000_000}) as engine,
        a_raw_request(engine.port, receive_buffer=4096, **LONG) as reader,
    ):
        # The head is out, and so there is a place for the rest.
        assert reader.recv(1, socket.MSG_PEEK)
        answers = {
            tenant: engine.http(tenant).post(
                "/v1/completions", json=LONG, headers={"x-request-id": "mine"}
            )
            for tenant in ("acme", "zeta")
        }
        refused = answers["acme"]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
        assert refused.headers["x-request-id"] == "mine"
        assert refused.headers["x-tidegate-reason"] == "engine_overloaded"
        assert int(refused.headers["content-length"]) == len(refused.content)
        assert answers["zeta"].status_code == 200
        assert status_of(engine, "acme") == 200
        assert json.loads(read_answer(reader))["usage"] == answers["zeta"].json()["usage"]
        eventually(
            lambda: engine.http().post("/v1/completions", json=LONG).status_code == 200,
            "room again",
        )
