"""What the engine measures about itself, for Prometheus.

Tenant series exist for the tenants that the policy in force declares, and for `unknown`; those of
a tenant that is gone disappear. Totals come from the scheduler's own books at the time of the
scrape, so that they are exact and cost nothing per token, and are there from the start.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tidegate_engine.core.request import PreemptionKey, SchedulerStats, TenantStats
from tidegate_engine.events import EngineStats, PolicyApplied, StepReport
from tidegate_engine.executor.base import Capacity
from tidegate_engine.latencies import Latencies, TenantLatencies
from tidegate_engine.picker_metrics import picker_series
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.text_format import text_of
from tidegate_policies.rules import UNKNOWN_TENANT, TenantRule, WatermarkRule

_WATERMARK_VALUES = {"green": 0, "yellow": 1, "red": 2}
# Shown from the start, so that a rate knows what the first one grew from.
_NO_PREEMPTIONS = {
    PreemptionKey(cause=cause, mode=mode): 0
    for cause in ("displaced", "reclaimed", "pressure")
    for mode in ("swap", "recompute")
}
_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SCHEDULER_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096)
_APPLY_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class Scrape:
    """What there was to show at one moment."""

    def __init__(self, histograms: CollectorRegistry, totals: Collector) -> None:
        self._histograms = histograms
        self._totals = CollectorRegistry()
        self._totals.register(totals)

    def render(self) -> bytes:
        """Write all series in Prometheus' text format.

        That takes about a second for thousands of tenants, and may be done in any thread: the
        totals don't change any more, and histograms are safe to read while they are observed.
        """
        return text_of(self._histograms) + text_of(self._totals)


class EngineMetrics:
    """All series of one engine, in a registry of its own."""

    def __init__(self, pool: str, *, model: str, capacity: Capacity) -> None:
        """Show nothing but `unknown` yet.

        Args:
            pool: `namespace/name`.
            model: As clients name it.
            capacity: KV memory of the executor.
        """
        self._pool = pool
        self._model = model
        self._capacity = capacity
        self._registry = CollectorRegistry()
        self._step = self._histogram("step_seconds", "Time executing a step", _STEP_BUCKETS)
        self._batch = self._histogram("step_batch_size", "Requests in a step", _SIZE_BUCKETS)
        self._scheduler = self._histogram(
            "scheduler_seconds", "Time planning and committing a step", _SCHEDULER_BUCKETS
        )
        self._apply = self._histogram(
            "policy_apply_seconds",
            "Time from a policy's arrival in the engine to its effect",
            _APPLY_BUCKETS,
        )
        step_tokens = Histogram(
            "tidegate_step_tokens",
            "Tokens computed in a step",
            ("pool", "kind"),
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._prefill = step_tokens.labels(pool, "prefill")
        self._decode = step_tokens.labels(pool, "decode")
        self._latencies = Latencies(pool, self._registry)
        self._steps = 0
        self._step_seconds = 0.0
        self._scheduler_seconds = 0.0
        self._refused: Counter[tuple[str, str]] = Counter()
        self._tenants: dict[str, TenantRule | None] = {UNKNOWN_TENANT: None}
        self._watermarks = WatermarkRule()

    def scrape(
        self,
        stats: EngineStats,
        *,
        miss_ratios: Mapping[tuple[str, str], float],
        rates_are_alone: bool,
        at: float,
    ) -> Scrape:
        """Take what there is to show.

        Args:
            stats: The engine now.
            miss_ratios: By tenant and objective, as `ServiceLevels` has them.
            rates_are_alone: Whether rate limits are divided by the number of engines.
            at: The engine's clock.
        """
        totals = _Totals(
            pool=self._pool,
            model=self._model,
            capacity=self._capacity,
            stats=stats,
            tenants=self._tenants,
            watermarks=self._watermarks,
            observed=self._latencies.collect(at=at),
            refused=dict(self._refused),
            miss_ratios=miss_ratios,
            rates_are_alone=rates_are_alone,
            overhead_ratio=self._scheduler_seconds / self._step_seconds
            if self._step_seconds
            else 0.0,
        )
        return Scrape(self._registry, totals)

    def observe_step(self, report: StepReport) -> None:
        """Count one step, and what was refused before it."""
        for refused in report.refused:
            self.count_refusal(refused.tenant, refused.reason)
        if not report.batch_size:
            return
        self._step.observe(report.step_seconds)
        self._scheduler.observe(report.scheduler_seconds)
        self._steps += 1
        self._step_seconds += report.step_seconds
        self._scheduler_seconds += report.scheduler_seconds
        self._batch.observe(report.batch_size)
        self._prefill.observe(report.prefill_tokens)
        self._decode.observe(report.decode_tokens)

    def observe_policy(self, applied: PolicyApplied) -> None:
        """Count one policy that took effect."""
        self._apply.observe(applied.seconds)

    def count_refusal(self, tenant: str, reason: str) -> None:
        """Count a request that was refused.

        Args:
            tenant: As the identity check found it.
            reason: Code of the error.
        """
        if tenant in self._tenants:
            self._refused[tenant, reason] += 1

    def steps(self) -> tuple[int, float]:
        """Return how many steps were executed, and the seconds that they took together."""
        return self._steps, self._step_seconds

    def shed(self) -> Mapping[str, int]:
        """Return how many requests of each tenant were refused, for whatever reason."""
        shed = Counter[str]()
        for (tenant, _), count in self._refused.items():
            shed[tenant] += count
        return shed

    def use_policy(self, policy: PolicyInForce) -> None:
        """Keep series for the tenants of `policy` and `unknown` alone."""
        rules = policy.snapshot.tenants
        # Another object each time: a scrape that is being written keeps its own.
        self._tenants = {**{rule.tenant: rule for rule in rules}, UNKNOWN_TENANT: None}
        self._watermarks = policy.snapshot.watermarks
        self._latencies.declare(rules)
        for tenant, reason in [key for key in self._refused if key[0] not in self._tenants]:
            del self._refused[tenant, reason]

    def latencies(self, tenant: str) -> TenantLatencies:
        """Return where the times of a tenant's requests go."""
        return self._latencies.of(tenant)

    def observe_length(self, kind: str, tokens: int, *, at: float) -> None:
        """Take in the length of a `prompt` or an `output`."""
        self._latencies.observe_length(kind, tokens, at=at)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(
            f"tidegate_{name}", text, ("pool",), buckets=buckets, registry=self._registry
        )
        return histogram.labels(self._pool)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Totals(Collector):
    """The scheduler's books at one moment as series.

    Attributes:
        tenants: The rules of those that are shown; None for `unknown`.
        observed: Series that are ready.
        refused: Requests by tenant and reason.
        overhead_ratio: Time planning and committing over time executing.
    """

    pool: str
    model: str
    capacity: Capacity
    stats: EngineStats
    tenants: Mapping[str, TenantRule | None]
    watermarks: WatermarkRule
    observed: Sequence[Metric]
    refused: Mapping[tuple[str, str], int]
    miss_ratios: Mapping[tuple[str, str], float]
    rates_are_alone: bool
    overhead_ratio: float

    def collect(self) -> Iterator[Metric]:
        """Yield every series once."""
        yield from self._engine_series(self.stats)
        yield from self._tenant_series(self.stats)
        yield from self._rule_series(self.stats.scheduler)
        yield self._miss_series()
        yield from self.observed
        yield from picker_series(
            self.stats.scheduler, self.capacity, pool=self.pool, model=self.model
        )

    def _engine_series(self, stats: EngineStats) -> Iterator[Metric]:
        engine = stats.scheduler
        yield from self._memory_series(engine)
        yield self._gauge(
            "watermark_state",
            "0 = green, 1 = yellow: no borrowed admission, 2 = red: borrowers are evicted",
            _WATERMARK_VALUES[engine.watermark],
        )
        levels = GaugeMetricFamily(
            "tidegate_kv_watermark_ratio",
            "Share of the KV blocks at which lending stops (high) and begins again (low)",
            labels=("pool", "level"),
        )
        levels.add_metric((self.pool, "low"), self.watermarks.low_percent / 100)
        levels.add_metric((self.pool, "high"), self.watermarks.high_percent / 100)
        yield levels
        yield self._gauge(
            "rate_limits_divided",
            "1 while Redis can't be asked: each engine has its part of every rate limit",
            int(self.rates_are_alone),
        )
        yield self._gauge("policy_revision", "The policy in force", engine.revision)
        yield self._gauge(
            "scheduler_overhead_ratio",
            "Time planning and committing over time executing, of all steps so far",
            self.overhead_ratio,
        )
        costs = GaugeMetricFamily(
            "tidegate_step_cost_seconds",
            "Time of the parts of a step and of a copy, as the scheduler has fitted them",
            labels=("pool", "part"),
        )
        for name, seconds in asdict(stats.step_costs).items():
            costs.add_metric((self.pool, name.removesuffix("_seconds")), seconds)
        yield costs
        after = CounterMetricFamily(
            "tidegate_tokens_after_cancel",
            "Tokens computed in steps planned after the cancel; more than 0 is a defect",
            labels=("pool",),
        )
        after.add_metric((self.pool,), stats.tokens_after_cancel)
        yield after

    def _memory_series(self, engine: SchedulerStats) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "tidegate_kv_blocks",
            "KV blocks by state: of the device's used, cached for later, and free; of the host's",
            labels=("pool", "state"),
        )
        used, cached = engine.kv_used_blocks, engine.kv_cached_blocks
        blocks.add_metric((self.pool, "used"), used)
        blocks.add_metric((self.pool, "cached"), cached)
        blocks.add_metric((self.pool, "free"), engine.kv_blocks - used - cached)
        blocks.add_metric((self.pool, "host_used"), engine.host_used_blocks)
        blocks.add_metric((self.pool, "host_free"), engine.host_blocks - engine.host_used_blocks)
        yield blocks
        swaps = CounterMetricFamily(
            "tidegate_swap_bytes",
            "KV moved between device and host",
            labels=("pool", "direction"),
        )
        block_bytes = self.capacity.block_bytes
        swaps.add_metric((self.pool, "out"), engine.swap_out_blocks * block_bytes)
        swaps.add_metric((self.pool, "in"), engine.swap_in_blocks * block_bytes)
        yield swaps

    def _tenant_series(self, stats: EngineStats) -> Iterator[Metric]:
        tenants = {name: stats.scheduler.tenants.get(name, TenantStats()) for name in self.tenants}
        requests = GaugeMetricFamily(
            "tidegate_requests", "Requests in the engine", labels=("pool", "tenant", "state")
        )
        tokens = CounterMetricFamily(
            "tidegate_tokens",
            "Tokens by kind: prompt tokens computed, found in the prefix cache, output tokens,"
            " tokens computed again",
            labels=("pool", "tenant", "kind"),
        )
        counters = GaugeMetricFamily(
            "tidegate_virtual_counter",
            "Service divided by weight, as fairness sees it",
            labels=("pool", "tenant"),
        )
        kv_seconds = CounterMetricFamily(
            "tidegate_kv_seconds",
            "KV blocks times the seconds that they were held",
            labels=("pool", "tenant"),
        )
        stops = GaugeMetricFamily(
            "tidegate_stop_seconds",
            "From the policy that stops a tenant, by Drain or Cancel, to its last KV block free",
            labels=("pool", "tenant"),
        )
        preemptions = CounterMetricFamily(
            "tidegate_preemptions", "Preemptions", labels=("pool", "tenant", "mode", "cause")
        )
        for name, tenant in tenants.items():
            requests.add_metric((self.pool, name, "running"), tenant.running)
            requests.add_metric((self.pool, name, "waiting"), tenant.waiting)
            requests.add_metric((self.pool, name, "swapped"), tenant.swapped)
            tokens.add_metric((self.pool, name, "prompt"), tenant.prompt_tokens)
            tokens.add_metric((self.pool, name, "cached"), tenant.cached_tokens)
            tokens.add_metric((self.pool, name, "output"), tenant.output_tokens)
            tokens.add_metric((self.pool, name, "recomputed"), tenant.recomputed_tokens)
            counters.add_metric((self.pool, name), tenant.virtual_counter)
            kv_seconds.add_metric((self.pool, name), tenant.kv_seconds)
            if tenant.stop_seconds is not None:
                stops.add_metric((self.pool, name), tenant.stop_seconds)
            for (cause, mode), count in {**_NO_PREEMPTIONS, **tenant.preemptions}.items():
                preemptions.add_metric((self.pool, name, mode, cause), count)
        yield from (requests, tokens, counters, kv_seconds, stops, preemptions)
        cancelled = CounterMetricFamily(
            "tidegate_cancelled",
            "Requests taken out before their end",
            labels=("pool", "tenant", "cause", "state"),
        )
        for key, count in stats.cancelled.items():
            if key.tenant in tenants:
                labels = (self.pool, key.tenant, key.cause.value, key.state)
                cancelled.add_metric(labels, count)
        yield cancelled
        shed = CounterMetricFamily(
            "tidegate_shed", "Requests refused at arrival", labels=("pool", "tenant", "reason")
        )
        for (name, reason), count in self.refused.items():
            shed.add_metric((self.pool, name, reason), count)
        yield shed

    def _rule_series(self, engine: SchedulerStats) -> Iterator[Metric]:
        """Yield what tenants have been promised, and what they hold of the KV."""
        weights = GaugeMetricFamily(
            "tidegate_tenant_weight",
            "Weight of the tenant in its tier",
            labels=("pool", "tenant", "tier"),
        )
        blocks = GaugeMetricFamily(
            "tidegate_tenant_kv_blocks",
            "KV blocks that the tenant holds, of these the ones above its nominal, and its nominal",
            labels=("pool", "tenant", "state"),
        )
        for name, rule in self.tenants.items():
            tenant = engine.tenants.get(name, TenantStats())
            nominal = 0
            if rule is not None:
                weights.add_metric((self.pool, name, rule.tier), rule.weight)
                nominal = rule.kv_nominal_percent * engine.kv_blocks // 100
            blocks.add_metric((self.pool, name, "used"), tenant.kv_used_blocks)
            blocks.add_metric((self.pool, name, "borrowed"), tenant.kv_borrowed_blocks)
            blocks.add_metric((self.pool, name, "nominal"), nominal)
        yield from (weights, blocks)

    def _miss_series(self) -> Metric:
        ratios = GaugeMetricFamily(
            "tidegate_slo_miss_ratio",
            "Share of first tokens (ttft) or of times between tokens (itl) that missed the target"
            " in the window of the tenant's service level; 0 without traffic",
            labels=("pool", "tenant", "objective"),
        )
        for (tenant, objective), ratio in self.miss_ratios.items():
            ratios.add_metric((self.pool, tenant, objective), ratio)
        return ratios

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"tidegate_{name}", text, labels=("pool",))
        gauge.add_metric((self.pool,), value)
        return gauge
