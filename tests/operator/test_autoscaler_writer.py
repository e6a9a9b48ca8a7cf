import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from tidegate_operator.autoscaler_writer import (
    KINDS,
    REST_SECONDS,
    RETRY_SECONDS,
    AutoscalerScope,
    AutoscalerWriter,
)
from tidegate_operator.kube import ApiError, KubeApi, Watched
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import Pools
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.resources import AutoscalingDriver
from tidegate_operator.status import StatusWriter
from tidegate_testing.objects import a_tenant_policy, a_view, an_engine_pool


class CountingApi(KubeApi):
    """Has no autoscalers, counts how often it is asked, and can't say of those kinds."""

    def __init__(self, *unknown: Watched) -> None:
        super().__init__(Configuration())
        self.asked: list[tuple[str, Sequence[str]]] = []
        self.unknown = unknown

    async def list_objects(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        self.asked.append((watched.plural, namespaces))
        if watched in self.unknown:
            raise ApiError(503, "GET", "no leader")
        return []

    @property
    def looks(self) -> int:
        return len(self.asked) // len(KINDS)


class PutClock:
    """The running loop's clock, which goes on only when it is put forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self._now)

    async def pass_by(self, seconds: float) -> None:
        self._now += seconds
        await turns_of_the_loop()


def a_writer(api: KubeApi, pools: Pools) -> AutoscalerWriter:
    metrics = Metrics()
    status = StatusWriter(api, metrics=metrics, writes_per_second=1.0)
    reporter = Reporter(pools, writer=status, metrics=metrics)
    return AutoscalerWriter(api, pools, reporter=reporter, scope=AutoscalerScope())


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_only_a_change_of_pools_asks_the_api_server() -> None:
    api, pools = CountingApi(), Pools(ReportBook())
    writer = a_writer(api, pools)
    running = asyncio.create_task(writer.run())
    asked = []

    # No pool at all is something to look at too: the autoscalers of earlier ones are left.
    for view in (
        a_view(),
        a_view(an_engine_pool()),
        a_view(an_engine_pool(), a_tenant_policy(weight=1)),
        a_view(an_engine_pool(), a_tenant_policy(weight=2)),
        a_view(an_engine_pool(autoscaling={"minReplicas": 1, "maxReplicas": 2, "driver": "HPA"})),
    ):
        pools.view = view
        writer.look()
        await turns_of_the_loop()
        asked.append(api.looks)

    assert asked == [1, 2, 2, 2, 3]
    running.cancel()


async def test_what_the_api_server_could_not_say_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api, pools = CountingApi(KINDS[AutoscalingDriver.HPA]), Pools(ReportBook())
    writer, clock = a_writer(api, pools), PutClock(monkeypatch)
    running = asyncio.create_task(writer.run())
    writer.look()
    await turns_of_the_loop()
    looks = [api.looks]

    async def look_after(seconds: float) -> None:
        await clock.pass_by(seconds - 0.1)
        looks.append(api.looks)
        await clock.pass_by(0.2)
        looks.append(api.looks)

    await look_after(RETRY_SECONDS)
    api.unknown = ()
    await look_after(RETRY_SECONDS)
    await look_after(REST_SECONDS)

    assert looks == [1, 1, 2, 2, 3, 3, 4]
    running.cancel()
