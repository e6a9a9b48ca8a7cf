"""The engine's process from its start until it serves, or until it can't."""

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import (
    EngineProcess,
    an_engine_process,
    engine_environment,
    run_to_its_end,
)
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.model_files import write_hf_directory
from tidegate_testing.models import random_tensors
from tidegate_testing.policies import a_snapshot

TOKEN = "an-admin-token-of-a-test"


@pytest.fixture
def publisher(redis_server: RedisServer) -> Publisher:
    return Publisher(redis_server.url)


class SlowModel:
    """A model whose configuration isn't there before it is asked for: loading waits for it."""

    def __init__(self, folder: Path) -> None:
        self.path = write_hf_directory(folder / "tiny", random_tensors())
        self._file = self.path / "config.json"
        self._config = self._file.read_text()
        self._file.unlink()
        os.mkfifo(self._file)

    def arrive(self) -> None:
        """Let loading go on."""
        self._file.write_text(self._config)


@contextmanager
def a_loading_engine(
    publisher: Publisher, folder: Path, **more: str
) -> Iterator[tuple[EngineProcess, SlowModel]]:
    model = SlowModel(folder)
    publisher.publish(a_snapshot(a_keyed_tenant("acme")), 1)
    variables = {"TIDEGATE_EXECUTOR": "torch", "TIDEGATE_MODEL": str(model.path), **more}
    with an_engine_process(publisher, folder, **variables) as engine:
        engine.wait_for("/healthz", 200)
        yield engine, model


def test_a_loading_engine_lives_is_not_ready_and_asks_to_come_back(
    publisher: Publisher, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        admin_port = probe.getsockname()[1]
    more = {"TIDEGATE_ADMIN_PORT": str(admin_port), "TIDEGATE_ADMIN_TOKEN": TOKEN}
    admin = f"http://127.0.0.1:{admin_port}/admin/policy", {"Authorization": f"Bearer {TOKEN}"}
    with a_loading_engine(publisher, tmp_path, **more) as (engine, model):
        assert ask(*admin)["error"]["code"] == "model_loading"
        ready = engine.get("/readyz")
        assert ready is not None
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "lacking": ["model"]})
        with engine.openai() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="tiny", prompt="hello")
            assert caught.value.status_code == 503
            assert caught.value.code == "model_loading"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.response.headers["x-tidegate-reason"] == "model_loading"
            model.arrive()
            engine.wait_until_ready()
            answer = client.completions.create(model="tiny", prompt="hello", max_tokens=3)
            assert answer.usage is not None
            assert answer.usage.completion_tokens in {1, 2, 3}
        assert ask(*admin)["revision"] == 1
        assert engine.terminate() == 0
        log = engine.log.read_text()
    assert re.search("float32, quantization none, cpu, (own kernels|PyTorch), 1 thread\n", log)
    assert "Traceback" not in log


def ask(url: str, headers: dict[str, str]) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(url, headers=headers, timeout=5).json()
    return answer


def test_a_signal_ends_a_loading_engine_in_peace(publisher: Publisher, tmp_path: Path) -> None:
    with a_loading_engine(publisher, tmp_path) as (engine, _):
        assert engine.terminate() == 0
        assert "stopped while loading" in engine.log.read_text()


@pytest.mark.parametrize("name", ["TIDEGATE_PORT", "TIDEGATE_ADMIN_PORT"])
def test_a_port_in_use_ends_the_start(publisher: Publisher, tmp_path: Path, name: str) -> None:
    more = {"TIDEGATE_PORT": "0", "TIDEGATE_ADMIN_TOKEN": TOKEN, "TIDEGATE_ADMIN_PORT": "0"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        more[name] = str(taken.getsockname()[1])
        ended = run_to_its_end(engine_environment(publisher, tmp_path, **more))
    assert ended.returncode == 1
    assert "in use" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_model_that_turns_out_to_be_broken_ends_the_start_in_one_line(
    publisher: Publisher, tmp_path: Path
) -> None:
    with a_loading_engine(publisher, tmp_path) as (engine, model):
        (model.path / "config.json").write_text(json.dumps([]))
        assert engine.process.wait(timeout=30) == 1
        log = engine.log.read_text()
    (line,) = [line for line in log.splitlines() if " ERROR " in line]
    assert line.endswith(
        f"can't start: {model.path}/config.json: must hold a JSON object, not list"
    )
    assert "Traceback" not in log
