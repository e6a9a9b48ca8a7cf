"""The series by which pools are scaled, kept up to date."""

import asyncio
from dataclasses import asdict

from tidegate_operator.autoscalers import pool_labels
from tidegate_operator.demand import demand
from tidegate_operator.metrics import Metrics
from tidegate_operator.pools import Pools
from tidegate_operator.reporter import Reporter

MEASURE_SECONDS = 2.0


class Signals:
    """Exposes what the load of every pool asks for.

    While engines can't be heard, the last numbers stand: an outage of Redis must not look like a
    pool without work.
    """

    def __init__(self, pools: Pools, *, reporter: Reporter, metrics: Metrics) -> None:
        self._pools = pools
        self._reporter = reporter
        self._metrics = metrics
        self._known: set[str] = set()

    async def run(self) -> None:
        """Measure until cancelled."""
        await self._reporter.hear_first()
        while True:
            if self._pools.is_listening:
                for key in list(self._pools.records):
                    self._measure(key)
            for key in self._known.difference(self._pools.records):
                self._known.discard(key)
                self._expose(key, None)
            await asyncio.sleep(MEASURE_SECONDS)

    def _measure(self, key: str) -> None:
        state = self._pools.state(key)
        if state is None:
            return
        self._known.add(key)
        self._expose(key, asdict(demand(state.pool, state.engines)))

    def _expose(self, key: str, values: dict[str, float] | None) -> None:
        """Set the series of a pool; None removes them."""
        labels = pool_labels(*key.split("/")).values()
        for name, gauge in self._metrics.demand.items():
            if values is None:
                gauge.remove(*labels)
            else:
                gauge.labels(*labels).set(values[name])
