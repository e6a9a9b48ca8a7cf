"""An engine's process that trusts a gateway, and tells its pool of a lower tier's service."""

from pathlib import Path

import httpx
from redis import Redis

from tidegate_devcluster.redis_server import RedisServer
from tidegate_testing.cluster import eventually
from tidegate_testing.control import Publisher
from tidegate_testing.engine_process import EngineProcess, an_engine_process
from tidegate_testing.engines import a_keyed_tenant
from tidegate_testing.policies import a_snapshot

TOKEN = "the-gateways-own-token"
POLICY = a_snapshot(
    a_keyed_tenant("acme", tier="gold", allowed_tiers=("bronze",)),
    tiers={"gold": 10, "bronze": 0},
)


def ask(engine: EngineProcess, tenant: str, tier: str) -> httpx.Response:
    return httpx.post(
        f"http://127.0.0.1:{engine.port}/v1/completions",
        json={"model": "simulated", "prompt": "Hello", "max_tokens": 3},
        headers={
            "authorization": f"Bearer {TOKEN}",
            "x-tidegate-tenant": tenant,
            "x-tidegate-tier": tier,
        },
    )


def test_a_gateways_request_in_a_lower_tier_is_told_to_the_pool_as_such(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    publisher = Publisher(redis_server.url)
    publisher.publish(POLICY, 1)
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    more = {"TIDEGATE_TRUSTED_GATEWAY_TOKEN_FILE": str(token_file)}
    with (
        Redis.from_url(publisher.url) as redis,
        an_engine_process(publisher, tmp_path, **more) as engine,
    ):
        engine.wait_until_ready()
        assert ask(engine, "acme", "bronze").status_code == 200
        assert ask(engine, "acme", "gold").status_code == 200
        assert ask(engine, "stranger", "gold").status_code == 401
        assert ask(engine, "acme", "none").status_code == 403
        key = f"tidegate:{publisher.pool}:service"
        eventually(
            lambda: set(redis.hkeys(key)) == {b"acme", b"acme bronze"}, "service, told to the pool"
        )
        assert engine.terminate() == 0
        log = engine.log.read_text()
        assert TOKEN not in log
        assert "stranger" not in log
