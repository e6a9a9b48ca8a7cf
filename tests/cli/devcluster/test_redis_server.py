from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tidegate_devcluster.assets import Assets
from tidegate_devcluster.redis_server import RedisServer


@pytest.fixture
def server(assets: Assets, tmp_path: Path) -> Iterator[RedisServer]:
    users = ["engine on >secret ~tidegate:* +@read", "operator on >word ~* +@all"]
    with RedisServer(tmp_path, assets, users=users) as started:
        yield started


def test_without_users_everyone_may_write(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as connection:
        connection.set("devcluster:test", "1")
        assert connection.getdel("devcluster:test") == b"1"


def test_users_may_do_what_their_rules_say_and_nobody_else_anything(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url_for(username="engine", password="secret")) as engine:
        assert engine.get("tidegate:policy") is None
        with pytest.raises(redis.exceptions.NoPermissionError):
            engine.set("tidegate:policy", "mine")
    with (
        redis.Redis.from_url(server.url) as anonymous,
        pytest.raises(redis.exceptions.AuthenticationError),
    ):
        anonymous.ping()


def test_a_restart_keeps_the_port_and_loses_the_content(server: RedisServer) -> None:
    url, pid = server.url_for(username="operator", password="word"), server.child.pid
    with redis.Redis.from_url(url) as operator:
        operator.set("tidegate:policy", "1")

        server.restart()

        assert server.child.pid != pid
        assert server.url_for(username="operator", password="word") == url
        assert operator.get("tidegate:policy") is None


def test_nothing_is_written_to_disk(server: RedisServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(server.url_for(username="operator", password="word")) as operator:
        operator.set("tidegate:policy", "1")

    server.stop()

    assert {path.name for path in tmp_path.iterdir()} == {"redis.conf", "redis-server.log"}
