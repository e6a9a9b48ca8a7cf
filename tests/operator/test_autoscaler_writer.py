import asyncio
from collections.abc import Sequence
from typing import Any

from kubernetes.aio.client import Configuration

from tidegate_operator.autoscaler_writer import KINDS, AutoscalerScope, AutoscalerWriter
from tidegate_operator.kube import KubeApi, Watched
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import Pools
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.status import StatusWriter
from tidegate_testing.objects import a_tenant_policy, a_view, an_engine_pool


class CountingApi(KubeApi):
    """Has no autoscalers, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(Configuration())
        self.asked: list[tuple[str, Sequence[str]]] = []

    async def list_objects(self, watched: Watched, namespaces: Sequence[str]) -> list[Any]:
        self.asked.append((watched.plural, namespaces))
        return []


async def turns_of_the_loop() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_only_a_change_of_pools_asks_the_api_server() -> None:
    api, metrics, pools = CountingApi(), Metrics(), Pools(ReportBook())
    status = StatusWriter(api, metrics=metrics, writes_per_second=1.0)
    reporter = Reporter(pools, writer=status, metrics=metrics)
    writer = AutoscalerWriter(api, pools, reporter=reporter, scope=AutoscalerScope())
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
        asked.append(len(api.asked) // len(KINDS))

    assert asked == [1, 2, 2, 2, 3]
    running.cancel()
