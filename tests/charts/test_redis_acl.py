"""The users of Redis that the chart renders, in a real Redis: who may do what."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, RedisError

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.pki import Pki
from tidegate_devcluster.processes import Child, Lifeline, free_port
from tidegate_devcluster.redis_server import RedisServer
from tidegate_engine import main as engine_main
from tidegate_engine.settings import Settings as EngineSettings
from tidegate_operator import main as operator_main
from tidegate_operator.settings import Settings as OperatorSettings
from tidegate_policies.wire import envelope_key, report_key, reports_channel, wake_channel
from tidegate_testing.cluster import eventually
from tidegate_testing.helm import Helm, acl_rules, pod_specs

pytestmark = pytest.mark.cluster

PASSWORDS = {"operator": "operators-own", "engine": "engines-own"}
HASHES = {user: hashlib.sha256(word.encode()).hexdigest() for user, word in PASSWORDS.items()}
POOL = "serving/chat"

Client = Callable[[str], "redis.Redis"]


@pytest.fixture(scope="module")
def server(
    helm: Helm, assets: Assets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    users = acl_rules(helm.render(), HASHES)
    assert len(users) == 3
    with RedisServer(tmp_path_factory.mktemp("redis"), assets, users=users) as started:
        yield started


@pytest.fixture
def connect(server: RedisServer) -> Iterator[Client]:
    opened: list[redis.Redis] = []

    def as_user(user: str) -> redis.Redis:
        url = server.url_for(username=user, password=PASSWORDS[user])
        opened.append(redis.Redis.from_url(url))
        return opened[-1]

    yield as_user
    for one in opened:
        one.close()


def assert_refused(user: redis.Redis, command: tuple[str, ...]) -> None:
    with pytest.raises(NoPermissionError):
        user.execute_command(*command)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "command",
    [
        ("HSET", envelope_key(POOL), "envelope", "forged"),
        ("HDEL", envelope_key(POOL), "envelope"),
        ("EXPIRE", envelope_key(POOL), "1"),
        ("SET", envelope_key(POOL), "forged"),
        ("PUBLISH", wake_channel(POOL), "7"),
        ("EVAL", "return 1", "0"),
        ("DEL", report_key(POOL, "engine-1")),
        ("SUBSCRIBE", reports_channel(POOL)),
        ("PSUBSCRIBE", "*"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("GET", "anything"),
        ("MONITOR",),
    ],
)
def test_engine_may_not(connect: Client, command: tuple[str, ...]) -> None:
    assert_refused(connect("engine"), command)


def test_engine_may_not_write_a_policy_from_inside_a_script_either(connect: Client) -> None:
    engine = connect("engine")
    script = engine.register_script("return redis.call('HSET', KEYS[1], 'envelope', 'forged')")
    with pytest.raises(RedisError, match="no permissions to access one of the keys"):
        script(keys=[envelope_key(POOL)])
    assert connect("operator").hget(envelope_key(POOL), "envelope") is None


@pytest.mark.parametrize(
    "command",
    [
        ("SET", report_key(POOL, "engine-0"), "{}"),
        ("HSET", "tidegate:serving/chat:rate:tokens:acme", "level", "9"),
        ("FLUSHALL",),
        ("CONFIG", "SET", "requirepass", "x"),
        ("ACL", "SETUSER", "operator", "+@all"),
        ("GET", "anything"),
    ],
)
def test_operator_may_not(connect: Client, command: tuple[str, ...]) -> None:
    assert_refused(connect("operator"), command)


def test_nobody_gets_in_without_a_password(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as stranger, pytest.raises(RedisError):
        stranger.ping()
    url = server.url_for(username="engine", password=HASHES["engine"])
    with redis.Redis.from_url(url) as guesser, pytest.raises(RedisError):
        guesser.ping()


def test_policy_goes_from_operator_to_engine_and_a_report_back(connect: Client) -> None:
    operator, engine = connect("operator"), connect("engine")
    wake: Any = engine.pubsub()  # type: ignore[no-untyped-call]
    reports: Any = operator.pubsub()  # type: ignore[no-untyped-call]
    with wake, reports:
        wake.subscribe(wake_channel(POOL))
        reports.psubscribe("tidegate:*:reports")
        assert wake.get_message(timeout=5)["type"] == "subscribe"
        assert reports.get_message(timeout=5)["type"] == "psubscribe"
        operator.hset(envelope_key(POOL), "envelope", "sealed")
        operator.publish(wake_channel(POOL), 1)
        assert wake.get_message(timeout=5)["data"] == b"1"
        assert engine.hget(envelope_key(POOL), "envelope") == b"sealed"
        engine.set(report_key(POOL, "engine-0"), "{}", px=5000)
        engine.publish(reports_channel(POOL), "{}")
        assert reports.get_message(timeout=5)["data"] == b"{}"
        assert operator.mget(report_key(POOL, "engine-0")) == [b"{}"]
        assert list(operator.scan_iter(match="tidegate:*:engine:*"))


def tls_words(words: list[str], folder: Path, port: int) -> list[str]:
    """Return the container's arguments for this machine: where its files and its port are."""
    mounted = "/var/run/secrets/tidegate/redis-tls/"
    here = [word.replace(mounted, f"{folder}/") for word in words]
    for user, digest in HASHES.items():
        here = [word.replace(f"$({user.upper()}_SHA256)", digest) for word in here]
    return [str(port) if word == "6379" else word for word in here]


async def test_with_a_certificate_redis_speaks_tls_alone_and_operator_and_engine_do_too(
    helm: Helm, assets: Assets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki, port = Pki(tmp_path / "pki"), free_port("127.0.0.1")
    certificate, key = pki.server("redis", ["127.0.0.1"])
    for name, path in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", pki.ca)):
        (tmp_path / name).write_bytes(path.read_bytes())
    values = {"redis": {"tlsSecretName": "redis-tls"}}
    spec = pod_specs(helm.render(values=values))["Deployment/tidegate-redis"]
    words = tls_words(spec["containers"][0]["args"], tmp_path, port)
    tool = assets.tool("redis-server")
    where: dict[str, Any] = {"ssl_ca_certs": str(tmp_path / "ca.crt")}
    url = f"rediss://engine:{PASSWORDS['engine']}@127.0.0.1:{port}/0"

    def answers() -> bool:
        try:
            with redis.Redis.from_url(url, **where) as engine:
                return bool(engine.ping())
        except RedisError:
            return False

    with Lifeline() as lifeline:
        child = Child(
            "redis-server",
            [str(tool.path), *words],
            log=tmp_path / "redis.log",
            lifeline=lifeline,
            environment=tool.environment,
        )
        try:
            eventually(answers, "an answer by TLS")
            with (
                redis.Redis.from_url(url.replace("rediss", "redis")) as plain,
                pytest.raises(RedisError),
            ):
                plain.ping()
            with redis.Redis.from_url(url) as trusting_others, pytest.raises(RedisError):
                trusting_others.ping()
            for prefix in ("TIDEGATE_", "TIDEGATE_OPERATOR_"):
                monkeypatch.setenv(f"{prefix}REDIS_URL", url)
                monkeypatch.setenv(f"{prefix}REDIS_CA_FILE", str(tmp_path / "ca.crt"))
            monkeypatch.setenv("TIDEGATE_OPERATOR_SIGNING_KEY_FILE", "unused.pem")
            monkeypatch.setenv("TIDEGATE_POOL", POOL)
            monkeypatch.setenv("TIDEGATE_VERIFY_KEY", base64.b64encode(bytes(32)).decode())
            for connection in (
                operator_main._redis(OperatorSettings()),
                engine_main.redis_client(EngineSettings.from_environment()),
            ):
                assert await connection.ping()
                await connection.aclose()
        finally:
            child.stop()
