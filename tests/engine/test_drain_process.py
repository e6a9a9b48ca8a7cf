"""The engine's process at its end, with signals."""

import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tidegate_cli.engine_metrics import EngineMetrics
from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot
from tidegate_testing.raw_requests import a_raw_request, connect, read_events, read_to_the_end


@pytest.fixture
def publisher(redis_server: RedisServer) -> Publisher:
    ready = Publisher(redis_server.url)
    ready.publish(a_snapshot(a_keyed_tenant("acme")), 1)
    return ready


@pytest.fixture
def engine(publisher: Publisher, tmp_path: Path) -> Iterator[EngineProcess]:
    with an_engine_process(publisher, tmp_path, TIDEGATE_DRAIN_SECONDS="30") as running:
        running.wait_until_ready()
        yield running


def check_log(engine: EngineProcess) -> None:
    log = engine.log.read_text()
    assert "Traceback" not in log
    assert "ERROR" not in log


def test_what_runs_is_finished_new_work_refused_and_further_signals_change_nothing(
    engine: EngineProcess,
) -> None:
    with a_raw_request(engine.port, stream=True, max_tokens=300) as reader:
        assert reader.recv(1)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            engine.process.send_signal(number)
        eventually(lambda: engine.status("/readyz") == 503, "an engine that drains")
        with engine.openai() as client, pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="simulated", prompt="Hello")
        assert (caught.value.status_code, caught.value.code) == (503, "engine_draining")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        events = read_events(reader)
        assert events.count(b'"finish_reason":"length"') == 1
        assert b"[DONE]" in events
    assert engine.process.wait(timeout=30) == 0
    check_log(engine)


def test_after_the_grace_a_whole_answer_is_503_a_stream_ends_with_an_error_and_the_code_is_0(
    publisher: Publisher, tmp_path: Path
) -> None:
    with an_engine_process(publisher, tmp_path, TIDEGATE_DRAIN_SECONDS="0.2") as engine:
        engine.wait_until_ready()
        with (
            a_raw_request(engine.port, max_tokens=4000) as reader,
            a_raw_request(engine.port, max_tokens=4000, stream=True) as stream,
        ):
            eventually(
                lambda: metrics(engine).value("tidegate_requests", state="running") == 2,
                "two running requests",
            )
            assert stream.recv(1)
            engine.process.send_signal(signal.SIGTERM)
            answer = read_to_the_end(reader)
            assert b'"code":"engine_draining"' in read_events(stream)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: " in answer
        assert b'"code":"engine_draining"' in answer
        assert engine.process.wait(timeout=30) == 0
        check_log(engine)


def test_readers_that_are_stuck_do_not_keep_a_process(publisher: Publisher, tmp_path: Path) -> None:
    more = {"TIDEGATE_DRAIN_SECONDS": "0.2", "TIDEGATE_SIMULATED_STEP_SECONDS": "0"}
    with an_engine_process(publisher, tmp_path, **more) as engine:
        engine.wait_until_ready()
        with (
            a_raw_request(engine.port, stream=True, max_tokens=4000, receive_buffer=4096),
            a_raw_request(engine.port, max_tokens=4000, logprobs=1, receive_buffer=4096),
            connect(engine.port),
        ):
            eventually(
                lambda: metrics(engine).value("tidegate_tokens_total", kind="output") == 8000,
                "all tokens",
            )
            assert engine.terminate() == 0
        check_log(engine)


def test_a_signal_while_the_model_loads_ends_in_peace(publisher: Publisher, tmp_path: Path) -> None:
    more = {"TIDEGATE_EXECUTOR": "torch", "TIDEGATE_KV_BLOCKS": "64"}
    with an_engine_process(publisher, tmp_path, **more) as engine:
        engine.wait_for("/healthz", 200)
        assert engine.status("/readyz") == 503
        assert engine.terminate() == 0
        check_log(engine)


def metrics(engine: EngineProcess) -> EngineMetrics:
    answer = engine.get("/metrics")
    return EngineMetrics("" if answer is None else answer.text)
