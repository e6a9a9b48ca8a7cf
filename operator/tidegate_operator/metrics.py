"""The operator's own metrics."""

import math
from collections.abc import Callable
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


DEMAND = {
    "desired_replicas": "Engines that the pool's load asks for; 0 without traffic.",
    "kv_utilization_ratio": "KV blocks in use, of all of the pool's ready engines.",
    "queue_time_p99_seconds": "99th percentile of the time from arrival to first admission, of the"
    " last minute.",
    "slo_miss_ratio": "Requests that missed their service level, of those that have one.",
    "waiting_tokens": "Prompt tokens of requests that were never admitted.",
}
"""Series by which pools are scaled, after `tidegate_pool_`; all are 0 without traffic."""

ENGINE_STATES = ("ready", "programmed", "lagging", "degraded")


class Metrics:
    """Counters and gauges of one operator process, in a registry of their own.

    Attributes:
        compile_seconds: Time to compile one pool, by pool.
        propagation_seconds: From the first change seen to the last ready engine that runs it, by
            pool.
        engines: Engines of each pool by state, see ENGINE_STATES.
        redis_reachable: 1 while policies can be stored and engines heard.
        status_writes: Requests to the API server that wrote a status, by kind and result.
        published: Policy revisions stored in Redis, by pool.
        demand: The signals by which pools are scaled, by name (see DEMAND), each by the labels of
            `tidegate_operator.autoscalers.pool_labels`.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.compile_seconds = Histogram(
            "tidegate_compile_seconds",
            "Time to compile the policy of one pool.",
            ("pool",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.propagation_seconds = Histogram(
            "tidegate_propagation_seconds",
            "Time from the first change seen to the last ready engine that runs it.",
            ("pool",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engines = Gauge(
            "tidegate_engines",
            "Ready engines; of these, the ones that run the newest policy (programmed) or don't"
            " (lagging), and the ones that can't read Redis (degraded).",
            ("pool", "state"),
            registry=self.registry,
        )
        self.redis_reachable = Gauge(
            "tidegate_redis_reachable",
            "1 while policies can be stored and engines heard; NaN while another operator leads.",
            registry=self.registry,
        )
        self.redis_reachable.set(math.nan)
        self.status_writes = Counter(
            "tidegate_status_writes",
            "Requests to the API server that wrote a status; the result is ok, error, or the status"
            " of a refusal.",
            ("kind", "result"),
            registry=self.registry,
        )
        self.published = Counter(
            "tidegate_policies_published",
            "Policy revisions stored for the engines.",
            ("pool",),
            registry=self.registry,
        )
        self.demand = {
            name: Gauge(
                f"tidegate_pool_{name}",
                text,
                ("pool_namespace", "pool_name"),
                registry=self.registry,
            )
            for name, text in DEMAND.items()
        }
        self._watch_age = Gauge(
            "tidegate_watch_age_seconds",
            "Time since the API server last told of an object or listed all of them.",
            registry=self.registry,
        )

    def forget(self, pool: str) -> None:
        """Drop the series of a pool that is gone."""
        for state in ENGINE_STATES:
            with suppress(KeyError):
                self.engines.remove(pool, state)
        for family in (self.compile_seconds, self.propagation_seconds, self.published):
            with suppress(KeyError):
                family.remove(pool)

    def watch_age_from(self, age_seconds: Callable[[], float]) -> None:
        """Ask `age_seconds` for the age of the watch at each scrape."""
        self._watch_age.set_function(age_seconds)
