"""What probes and Prometheus ask of one operator process, on one port."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

_UNHEALTHY = 503


@dataclass(slots=True)
class Health:
    """What the process says about itself.

    Attributes:
        is_ready: It leads and knows the cluster, or stands by and could take over.
        is_alive: Whether a restart would not help.
    """

    is_ready: bool = False
    is_alive: Callable[[], bool] = field(default=lambda: True)


@asynccontextmanager
async def serving_health(
    health: Health, registry: CollectorRegistry, *, host: str, port: int
) -> AsyncIterator[None]:
    """Serve `/healthz`, `/readyz` and `/metrics` for the length of the block.

    In the event loop, not beside it: a loop that hangs must fail its probes.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _verdict(health.is_alive(), "the watch is stale")

    async def readyz(_: web.Request) -> web.Response:
        return _verdict(health.is_ready, "not ready yet")

    async def metrics(_: web.Request) -> web.Response:
        content = generate_latest(registry)
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield
    finally:
        await runner.cleanup()


def _verdict(is_good: bool, problem: str) -> web.Response:  # noqa: FBT001
    return web.Response(text="ok" if is_good else problem, status=200 if is_good else _UNHEALTHY)
