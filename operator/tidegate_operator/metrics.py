"""The operator's own metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters and gauges of one operator process, in a registry of their own.

    Attributes:
        compile_seconds: Time to compile one pool.
        propagation_seconds: From the first change seen to the last ready engine that runs it.
        engines: Engines of each pool by state: ready, programmed, lagging.
        status_writes: Requests to the API server that wrote a status, by kind and result.
        published: Policy revisions stored in Redis.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.compile_seconds = Histogram(
            "tidegate_compile_seconds",
            "Time to compile the policy of one pool.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.propagation_seconds = Histogram(
            "tidegate_propagation_seconds",
            "Time from the first change seen to the last ready engine that runs it.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.engines = Gauge(
            "tidegate_engines", "Engines.", ("pool", "state"), registry=self.registry
        )
        self.status_writes = Counter(
            "tidegate_status_writes", "Status writes.", ("kind", "result"), registry=self.registry
        )
        self.published = Counter(
            "tidegate_policies_published", "Policy revisions stored.", registry=self.registry
        )
        self._watch_age = Gauge(
            "tidegate_watch_age_seconds",
            "Time since the API server last told of an object or listed all of them.",
            registry=self.registry,
        )

    def watch_age_from(self, age_seconds: Callable[[], float]) -> None:
        """Ask `age_seconds` for the age of the watch at each scrape."""
        self._watch_age.set_function(age_seconds)
