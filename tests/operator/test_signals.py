import asyncio
from contextlib import suppress
from typing import Any, cast

import pytest
from prometheus_client import generate_latest

from tidegate_operator import signals as module
from tidegate_operator.compiler import compile_pool
from tidegate_operator.metrics import DEMAND, Metrics
from tidegate_operator.pools import PoolRecord, Pools
from tidegate_operator.reporter import Reporter
from tidegate_operator.reports import ReportBook
from tidegate_operator.signals import Signals
from tidegate_operator.status import StatusWriter
from tidegate_policies.wire import EngineReport
from tidegate_testing.control import until
from tidegate_testing.objects import a_pod_view, a_view, an_engine_pool

KEY = "team/chat"
BUSY = EngineReport(
    pool=KEY, pod="a", incarnation="i", sequence=1, kv_blocks=100, kv_used_blocks=90
)


def series(metrics: Metrics) -> dict[str, float]:
    lines = generate_latest(metrics.registry).decode().splitlines()
    found = (line.rpartition(" ") for line in lines if 'pool_name="chat"' in line)
    return {name.partition("{")[0]: float(value) for name, _, value in found}


async def test_series_are_0_without_traffic_stand_without_redis_and_go_with_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MEASURE_SECONDS", 0.01)
    pool = an_engine_pool()
    book, metrics = ReportBook(), Metrics()
    pools = Pools(book)
    pools.view = a_view(pool)
    pools.records[KEY] = PoolRecord(compile_pool(pools.view, pool))
    writer = StatusWriter(cast(Any, None), metrics=metrics, writes_per_second=1.0)
    reporter = Reporter(pools, writer=writer, metrics=metrics)
    reporter.set_heard()
    run = asyncio.create_task(Signals(pools, reporter=reporter, metrics=metrics).run())
    try:
        nothing = dict.fromkeys((f"tidegate_pool_{name}" for name in DEMAND), 0.0)
        await until(lambda: series(metrics) == nothing, "series of a pool without engines")

        pools.view = a_view(pool, a_pod_view("a"))
        book.accept(BUSY, now=0.0)
        busy = nothing | {
            "tidegate_pool_desired_replicas": 2.0,
            "tidegate_pool_kv_utilization_ratio": 0.9,
        }
        await until(lambda: series(metrics) == busy, "series of a busy pool")

        pools.is_listening = False
        book.expire(now=1e9)
        for _ in range(5):
            await asyncio.sleep(module.MEASURE_SECONDS)
            assert series(metrics) == busy

        pools.records.clear()
        await until(lambda: not series(metrics), "the end of the series")
    finally:
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
