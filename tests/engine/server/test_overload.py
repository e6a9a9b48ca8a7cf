"""More than can be served: the rest is refused at once, and the engine lives on."""

import asyncio
import contextlib
import socket
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from tidegate_policies.rules import StopPolicy
from tidegate_testing.cluster import eventually
from tidegate_testing.engines import MODEL, RunningEngine, a_keyed_tenant, a_running_engine
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_completion, a_head, a_raw_request, connect
from tidegate_testing.scheduling import a_request

SHORT = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
FLOOD = a_keyed_tenant("flood", stop=StopPolicy.HOLD)


def check_serves(engine: RunningEngine) -> None:
    assert engine.http().post("/v1/completions", json=SHORT).status_code == 200


def test_a_full_queue_is_503_at_once() -> None:
    with a_running_engine(step_seconds=0.001, max_num_seqs=1, max_waiting=2) as engine:
        with ExitStack() as clients:
            for _ in range(3):
                clients.enter_context(a_raw_request(engine.port))
                # Before one runs, the queue has room for no more than two.
                eventually(lambda: engine.stats().scheduler.running == 1, "one that runs")
            eventually(lambda: engine.stats().scheduler.waiting == 2, "a full queue")
            refused = engine.http().post("/v1/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert engine.stats().scheduler.waiting == 2
        eventually(engine.is_idle, "an idle engine")
        check_serves(engine)


def hold_a_flood(engine: RunningEngine, *, sent: int) -> int:
    """Send requests of a tenant on hold; return how many wait then."""
    for _ in range(sent):
        engine.service.engine.submit(a_request("flood"))
    return engine.stats().scheduler.waiting


def code_of(engine: RunningEngine, tenant: str) -> str:
    answer = engine.http(tenant).post("/v1/completions", json=SHORT)
    return str(answer.headers.get("x-tidegate-reason", answer.status_code))


def test_with_very_many_tenants_one_that_floods_keeps_none_out() -> None:
    names = [f"tenant{number}" for number in range(100)]
    policy = a_snapshot(FLOOD, *map(a_keyed_tenant, names))
    with a_running_engine(policy, max_waiting=40) as engine:
        assert hold_a_flood(engine, sent=50) == 30
        assert code_of(engine, "flood") == "queue_full"
        assert [code_of(engine, name) for name in names[:5]] == ["200"] * 5


def test_a_tenant_that_is_declared_while_another_fills_the_queue_gets_in() -> None:
    with a_running_engine(a_snapshot(FLOOD), max_waiting=40) as engine:
        assert hold_a_flood(engine, sent=50) == 40
        engine.apply(a_snapshot(FLOOD, a_keyed_tenant("fresh")))
        assert code_of(engine, "fresh") == "200"
        assert code_of(engine, "flood") == "queue_full"


def test_thousands_of_callers_are_answered_or_refused_and_leave_nothing() -> None:
    async def call(port: int, slots: asyncio.Semaphore) -> str:
        async with slots:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(a_completion(max_tokens=2))
            status = (await reader.readline()).split()[1].decode()
            writer.close()
            return status

    async def call_all(port: int) -> Counter[str]:
        slots = asyncio.Semaphore(400)
        return Counter(await asyncio.gather(*(call(port, slots) for _ in range(1500))))

    with a_running_engine(step_seconds=0.02, max_num_seqs=4, max_waiting=50) as engine:
        statuses = asyncio.run(call_all(engine.port))
        assert set(statuses) == {"200", "503"}
        assert statuses.total() == 1500
        generations = engine.service.generations
        eventually(lambda: not generations.running_ids and engine.is_idle(), "an empty engine")
        assert not generations._by_request
        assert engine.stats().scheduler.kv_used_blocks == 0
        check_serves(engine)


def test_beyond_the_open_requests_work_is_refused_and_the_rest_served() -> None:
    options = {"max_connections": 8}
    with a_running_engine(step_seconds=0.001, http_options=options) as engine:
        client = engine.http()
        with ExitStack() as clients:
            for _ in range(6):
                clients.enter_context(a_raw_request(engine.port))
            generations = engine.service.generations
            eventually(lambda: len(generations.running_ids) == 6, "six open requests")
            refused = client.post("/v1/completions", json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_overloaded"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["x-tidegate-reason"] == "engine_overloaded"
            assert client.get("/healthz").status_code == 200
            cancelled = client.delete(f"/v1/requests/{generations.running_ids[0]}")
            assert cancelled.status_code == 200
            eventually(lambda: len(generations.running_ids) == 5, "a place")
            assert client.post("/v1/completions", json=SHORT).status_code == 200
        eventually(engine.is_idle, "an idle engine")


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost", a_head(100) + b"{"])
def test_a_connection_that_does_not_get_its_request_out_is_cut(sent: bytes) -> None:
    with (
        a_running_engine(http_options={"request_seconds": 0.2}) as engine,
        connect(engine.port) as silent,
    ):
        silent.sendall(sent)
        check_is_cut(silent)
        check_serves(engine)


def test_an_answer_may_take_longer_than_a_request_may() -> None:
    with a_running_engine(step_seconds=0.01, http_options={"request_seconds": 0.2}) as engine:
        began = time.monotonic()
        answer = engine.http().post("/v1/completions", json={**SHORT, "max_tokens": 50})
        assert answer.status_code == 200
        assert time.monotonic() - began > 0.2


def test_connections_beyond_the_most_are_cut_and_those_that_were_there_served() -> None:
    with a_running_engine(http_options={"max_connections": 20}) as engine:
        client = engine.http()
        assert client.get("/healthz").status_code == 200
        with ExitStack() as flood:
            idle = [flood.enter_context(connect(engine.port)) for _ in range(19)]
            for _ in range(200):
                check_is_cut(flood.enter_context(connect(engine.port)))
            assert client.post("/v1/completions", json=SHORT).status_code == 200
            idle[0].sendall(a_completion(max_tokens=1))
            assert idle[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
        eventually(lambda: serves_anew(engine), "a place for a new connection")


def serves_anew(engine: RunningEngine) -> bool:
    with contextlib.suppress(ConnectionError), connect(engine.port) as fresh:
        fresh.sendall(a_completion(max_tokens=1))
        return fresh.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return False


def check_is_cut(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
