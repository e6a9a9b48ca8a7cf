import aiohttp
from prometheus_client import CollectorRegistry, Gauge

from tidegate_devcluster.processes import free_port
from tidegate_operator.health import Health, serving_health


async def test_probes_and_prometheus_get_their_answers() -> None:
    health, registry, port = Health(), CollectorRegistry(), free_port("127.0.0.1")
    Gauge("tidegate_anything", "Anything.", registry=registry).set(7)
    is_alive = True
    health.is_alive = lambda: is_alive

    async def ask(path: str) -> tuple[int, str]:
        async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, await answer.text()

    async with (
        serving_health(health, registry, host="127.0.0.1", port=port),
        aiohttp.ClientSession() as session,
    ):
        assert await ask("/healthz") == (200, "ok")
        assert await ask("/readyz") == (503, "not ready yet")
        health.is_ready = True
        assert await ask("/readyz") == (200, "ok")
        is_alive = False
        assert await ask("/healthz") == (503, "the watch is stale")
        status, page = await ask("/metrics")
        assert (status, "tidegate_anything 7.0" in page) == (200, True)
        assert (await ask("/other"))[0] == 404
