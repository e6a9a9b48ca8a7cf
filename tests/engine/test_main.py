"""The engine as a process."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engines import a_keyed_tenant, key_of
from tidegate_testing.policies import a_snapshot

POD = "engine-0"
POLICY = a_snapshot(a_keyed_tenant("acme"))


@dataclass
class EngineProcess:
    """A running `python -m tidegate_engine`."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def get(self, path: str) -> httpx.Response | None:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}{path}", timeout=5)
        except httpx.TransportError:
            return None

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            answer = self.get("/readyz")
            return answer is not None and answer.status_code == 200

        eventually(is_ready, "a ready engine", timeout_seconds=90)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key_of("acme"), max_retries=0
        )


def environment(publisher: Publisher, folder: Path, **more: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")},
        "TIDEGATE_POOL": publisher.pool,
        "TIDEGATE_POD_NAME": POD,
        "TIDEGATE_REDIS_URL": publisher.url,
        "TIDEGATE_VERIFY_KEY": publisher.verify_key,
        "TIDEGATE_STATE_DIR": str(folder / "state"),
        "TIDEGATE_HOST": "127.0.0.1",
        "TIDEGATE_EXECUTOR": "simulated",
        **more,
    }


@contextmanager
def an_engine_process(publisher: Publisher, folder: Path, **more: str) -> Iterator[EngineProcess]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = folder / "engine.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidegate_engine"],
            env=environment(publisher, folder, TIDEGATE_PORT=str(port), **more),
            stderr=output,
        )
    try:
        yield EngineProcess(process, port, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def publisher(redis_server: RedisServer) -> Publisher:
    return Publisher(redis_server.url)


def test_a_process_serves_and_ends_in_peace(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(publisher, tmp_path) as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            answer = client.completions.create(model="simulated", prompt="Hello", max_tokens=3)
        assert len(answer.choices[0].text) == 3
        report = publisher.report(POD)
        assert report is not None
        assert report.revision == 1
        assert engine.terminate() == 0
        log = engine.log.read_text()
    assert "serving simulated: simulated (no weights); 1024 KV blocks of 16 tokens and " in log
    assert "a step takes " in log
    assert "Traceback" not in log


def test_running_streams_end_within_the_drain_and_new_work_is_refused(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(publisher, tmp_path, TIDEGATE_DRAIN_SECONDS="30") as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            stream = client.completions.create(
                model="simulated", prompt="Hello", max_tokens=100, stream=True
            )
            next(iter(stream))
            engine.process.send_signal(signal.SIGTERM)
            eventually(lambda: status(engine, "/readyz") == 503, "an engine that drains")
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="simulated", prompt="Hello")
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert engine.process.wait(timeout=30) == 0


def test_streams_left_after_the_drain_get_an_error(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(publisher, tmp_path, TIDEGATE_DRAIN_SECONDS="0") as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            stream = client.completions.create(
                model="simulated", prompt="Hello", max_tokens=10_000, stream=True
            )
            next(iter(stream))
            engine.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError) as caught:
                for _ in stream:
                    pass
        assert caught.value.code == "engine_draining"
        assert engine.process.wait(timeout=30) == 0


def test_a_restart_without_redis_serves_the_last_policy(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(publisher, tmp_path) as engine:
        engine.wait_until_ready()
        assert engine.terminate() == 0
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        an_engine_process(
            publisher,
            tmp_path,
            TIDEGATE_REDIS_URL=f"redis://127.0.0.1:{silent.getsockname()[1]}",
            TIDEGATE_REDIS_TIMEOUT_SECONDS="0.2",
        ) as engine,
    ):
        engine.wait_until_ready()
        with engine.openai() as client:
            client.completions.create(model="simulated", prompt="Hello", max_tokens=1)
        assert engine.terminate() == 0


def test_a_wrong_setting_is_one_line_and_code_2(publisher: Publisher, tmp_path: Path) -> None:
    ended = run_to_its_end(environment(publisher, tmp_path, TIDEGATE_KV_BLOCKS="none"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("TIDEGATE_KV_BLOCKS: ")
    assert ended.stderr.count("\n") == 1


def test_a_model_that_is_missing_is_named(publisher: Publisher, tmp_path: Path) -> None:
    more = {"TIDEGATE_EXECUTOR": "torch", "TIDEGATE_MODEL": str(tmp_path / "none.gguf")}
    ended = run_to_its_end(environment(publisher, tmp_path, **more))
    assert ended.returncode == 1
    assert "none.gguf" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_is_named(publisher: Publisher, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_to_its_end(environment(publisher, tmp_path, TIDEGATE_PORT=port))
    assert ended.returncode == 1
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("batching", ["static", "bucketed"])
def test_an_engine_can_batch_as_the_baselines_do(
    publisher: Publisher, tmp_path: Path, batching: str
) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(publisher, tmp_path, TIDEGATE_BATCHING=batching) as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            answer = client.completions.create(model="simulated", prompt="Hello", max_tokens=7)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 7
        assert engine.terminate() == 0


@pytest.mark.model
def test_a_real_model_answers_a_question(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(POLICY, 1)
    with an_engine_process(
        publisher, tmp_path, TIDEGATE_EXECUTOR="torch", TIDEGATE_KV_BLOCKS="64"
    ) as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "What is the capital of France?"}],
                temperature=0,
                max_tokens=24,
            )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        assert engine.terminate() == 0


def run_to_its_end(variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tidegate_engine"],
        env=variables,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def status(engine: EngineProcess, path: str) -> int | None:
    answer = engine.get(path)
    return None if answer is None else answer.status_code
