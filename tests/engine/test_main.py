"""The engine as a process."""

import base64
import socket
import threading
from pathlib import Path

import openai
import pytest
from redis import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine import main
from tidegate_engine.model.errors import ModelLoadError
from tidegate_engine.parts import Parts
from tidegate_engine.server.connections import listen
from tidegate_engine.settings import Settings
from tidegate_policies.rules import RateRule
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import (
    POD,
    an_engine_process,
    engine_environment,
    run_to_its_end,
)
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot

POLICY = a_snapshot(a_keyed_tenant("acme"))


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
    assert f"serving   simulated at http://127.0.0.1:{engine.port}, started in " in log
    assert log.index("costs     a step ") > log.index("limits    16384 tokens in KV blocks")
    assert "Traceback" not in log


def test_a_process_takes_part_in_its_pools_rates_and_shares(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(a_snapshot(a_keyed_tenant("acme", rate=RateRule(requests_per_minute=1))), 1)
    with Redis.from_url(publisher.url) as redis, an_engine_process(publisher, tmp_path) as engine:
        engine.wait_until_ready()
        with engine.openai() as client:
            client.completions.create(model="simulated", prompt="Hello", max_tokens=3)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="simulated", prompt="Hello", max_tokens=3)
        assert caught.value.code == "rate_limited"
        key = f"tidegate:{publisher.pool}:service"
        eventually(lambda: redis.hget(key, "acme") is not None, "its service, told to the pool")
        assert engine.terminate() == 0


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
    ended = run_to_its_end(engine_environment(publisher, tmp_path, TIDEGATE_KV_BLOCKS="none"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("TIDEGATE_KV_BLOCKS: ")
    assert ended.stderr.count("\n") == 1


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


async def test_the_thread_that_loads_a_model_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else the team that OpenMP keeps for it would count, and slow every step down by a third.
    loaders = []

    def load(_settings: Settings, *, created: int) -> Parts:
        loaders.append(threading.current_thread())
        raise ModelLoadError("none", f"there was none at {created}")

    monkeypatch.setattr(main, "load_parts", load)
    key = base64.b64encode(bytes(32)).decode()
    settings = Settings(pool="serving/main", redis_url="redis://127.0.0.1:1", verify_key=key)
    with listen("127.0.0.1", 0) as listener:
        assert (
            await main.run_engine(settings, listener, admin=None, gateway_token=None)
            == main.EXIT_FAILED
        )
    [loader] = loaders
    loader.join(timeout=30)
    assert not loader.is_alive()
