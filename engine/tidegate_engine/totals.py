"""The scheduler's books as series."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from tidegate_engine.core.request import PreemptionKey, SchedulerStats, TenantStats
from tidegate_engine.events import EngineStats
from tidegate_engine.executor.base import Capacity
from tidegate_engine.picker_metrics import picker_series
from tidegate_engine.text_format import Family
from tidegate_policies.rules import TenantRule, WatermarkRule

_WATERMARK_VALUES = {"green": 0, "yellow": 1, "red": 2}
# Shown from the start, so that a rate knows what the first one grew from.
_NO_PREEMPTIONS = {
    PreemptionKey(cause=cause, mode=mode): 0
    for cause in ("displaced", "reclaimed", "pressure")
    for mode in ("swap", "recompute")
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """The scheduler's books at one moment as series.

    Attributes:
        tenants: The rules of those that are shown; None for `unknown`.
        observed: What yields the series of histograms, and of what is counted beside them.
        refused: Requests by tenant and reason.
        overhead_ratio: Time planning and committing over time executing.
    """

    pool: str
    model: str
    capacity: Capacity
    stats: EngineStats
    tenants: Mapping[str, TenantRule | None]
    watermarks: WatermarkRule
    observed: Iterable[Callable[[], Iterable[Family]]]
    refused: Mapping[tuple[str, str], int]
    miss_ratios: Mapping[tuple[str, str], float]
    rates_are_alone: bool
    overhead_ratio: float

    def collect(self) -> Iterator[Family]:
        """Yield every series once."""
        yield from self._engine_series(self.stats)
        yield from self._tenant_series(self.stats)
        yield from self._rule_series(self.stats.scheduler)
        yield self._miss_series()
        for families in self.observed:
            yield from families()
        yield from picker_series(
            self.stats.scheduler, self.capacity, pool=self.pool, model=self.model
        )

    def _engine_series(self, stats: EngineStats) -> Iterator[Family]:
        engine = stats.scheduler
        yield from self._memory_series(engine)
        yield self._gauge(
            "watermark_state",
            "0 = green, 1 = yellow: no borrowed admission, 2 = red: borrowers are evicted",
            _WATERMARK_VALUES[engine.watermark],
        )
        levels = Family(
            "tidegate_kv_watermark_ratio",
            "gauge",
            "Share of the KV blocks at which lending stops (high) and begins again (low)",
            ("pool", "level"),
        )
        levels.add((self.pool, "low"), self.watermarks.low_percent / 100)
        levels.add((self.pool, "high"), self.watermarks.high_percent / 100)
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
        costs = Family(
            "tidegate_step_cost_seconds",
            "gauge",
            "Time of the parts of a step and of a copy, as the scheduler has fitted them",
            ("pool", "part"),
        )
        for name, seconds in asdict(stats.step_costs).items():
            costs.add((self.pool, name.removesuffix("_seconds")), seconds)
        yield costs
        after = Family(
            "tidegate_tokens_after_cancel_total",
            "counter",
            "Tokens computed in steps planned after the cancel; more than 0 is a defect",
        )
        after.add((self.pool,), stats.tokens_after_cancel)
        yield after

    def _memory_series(self, engine: SchedulerStats) -> Iterator[Family]:
        blocks = Family(
            "tidegate_kv_blocks",
            "gauge",
            "KV blocks by state: of the device's used, cached for later, and free; of the host's",
            ("pool", "state"),
        )
        used, cached = engine.kv_used_blocks, engine.kv_cached_blocks
        blocks.add((self.pool, "used"), used)
        blocks.add((self.pool, "cached"), cached)
        blocks.add((self.pool, "free"), engine.kv_blocks - used - cached)
        blocks.add((self.pool, "host_used"), engine.host_used_blocks)
        blocks.add((self.pool, "host_free"), engine.host_blocks - engine.host_used_blocks)
        yield blocks
        swaps = Family(
            "tidegate_swap_bytes_total",
            "counter",
            "KV moved between device and host",
            ("pool", "direction"),
        )
        block_bytes = self.capacity.block_bytes
        swaps.add((self.pool, "out"), engine.swap_out_blocks * block_bytes)
        swaps.add((self.pool, "in"), engine.swap_in_blocks * block_bytes)
        yield swaps

    def _tenant_series(self, stats: EngineStats) -> Iterator[Family]:
        tenants = {name: stats.scheduler.tenants.get(name, TenantStats()) for name in self.tenants}
        requests = Family(
            "tidegate_requests", "gauge", "Requests in the engine", ("pool", "tenant", "state")
        )
        tokens = Family(
            "tidegate_tokens_total",
            "counter",
            "Tokens by kind: prompt tokens computed, found in the prefix cache, output tokens,"
            " tokens computed again",
            ("pool", "tenant", "kind"),
        )
        counters = Family(
            "tidegate_virtual_counter",
            "gauge",
            "Service divided by weight, as fairness sees it",
            ("pool", "tenant"),
        )
        kv_seconds = Family(
            "tidegate_kv_seconds_total",
            "counter",
            "KV blocks times the seconds that they were held",
            ("pool", "tenant"),
        )
        stops = Family(
            "tidegate_stop_seconds",
            "gauge",
            "From the policy that stops a tenant, by Drain or Cancel, to its last KV block free",
            ("pool", "tenant"),
        )
        preemptions = Family(
            "tidegate_preemptions_total",
            "counter",
            "Preemptions",
            ("pool", "tenant", "mode", "cause"),
        )
        deferred = Family(
            "tidegate_deferred_decodes_total",
            "counter",
            "Output tokens that came a step later, for a higher tier's prompts or its ITL target",
            ("pool", "tenant"),
        )
        for name, tenant in tenants.items():
            requests.add((self.pool, name, "running"), tenant.running)
            requests.add((self.pool, name, "waiting"), tenant.waiting)
            requests.add((self.pool, name, "swapped"), tenant.swapped)
            tokens.add((self.pool, name, "prompt"), tenant.prompt_tokens)
            tokens.add((self.pool, name, "cached"), tenant.cached_tokens)
            tokens.add((self.pool, name, "output"), tenant.output_tokens)
            tokens.add((self.pool, name, "recomputed"), tenant.recomputed_tokens)
            counters.add((self.pool, name), tenant.virtual_counter)
            kv_seconds.add((self.pool, name), tenant.kv_seconds)
            deferred.add((self.pool, name), tenant.deferred_decodes)
            if tenant.stop_seconds is not None:
                stops.add((self.pool, name), tenant.stop_seconds)
            for (cause, mode), count in {**_NO_PREEMPTIONS, **tenant.preemptions}.items():
                preemptions.add((self.pool, name, mode, cause), count)
        yield from (requests, tokens, counters, kv_seconds, stops, preemptions, deferred)
        cancelled = Family(
            "tidegate_cancelled_total",
            "counter",
            "Requests taken out before their end",
            ("pool", "tenant", "cause", "state"),
        )
        for key, count in stats.cancelled.items():
            if key.tenant in tenants:
                labels = (self.pool, key.tenant, key.cause.value, key.state)
                cancelled.add(labels, count)
        yield cancelled
        shed = Family(
            "tidegate_shed_total",
            "counter",
            "Requests refused at arrival",
            ("pool", "tenant", "reason"),
        )
        for (name, reason), count in self.refused.items():
            shed.add((self.pool, name, reason), count)
        yield shed

    def _rule_series(self, engine: SchedulerStats) -> Iterator[Family]:
        """Yield what tenants have been promised, and what they hold of the KV."""
        weights = Family(
            "tidegate_tenant_weight",
            "gauge",
            "Weight of the tenant in its tier",
            ("pool", "tenant", "tier"),
        )
        blocks = Family(
            "tidegate_tenant_kv_blocks",
            "gauge",
            "KV blocks that the tenant holds, of these the ones above its nominal, and its nominal",
            ("pool", "tenant", "state"),
        )
        for name, rule in self.tenants.items():
            tenant = engine.tenants.get(name, TenantStats())
            nominal = 0
            if rule is not None:
                weights.add((self.pool, name, rule.tier), rule.weight)
                nominal = rule.kv_nominal_percent * engine.kv_blocks // 100
            blocks.add((self.pool, name, "used"), tenant.kv_used_blocks)
            blocks.add((self.pool, name, "borrowed"), tenant.kv_borrowed_blocks)
            blocks.add((self.pool, name, "nominal"), nominal)
        yield from (weights, blocks)

    def _miss_series(self) -> Family:
        ratios = Family(
            "tidegate_slo_miss_ratio",
            "gauge",
            "Share of first tokens (ttft) or of times between tokens (itl) that missed the target"
            " in the window of the tenant's service level; 0 without traffic",
            ("pool", "tenant", "objective"),
        )
        for (tenant, objective), ratio in self.miss_ratios.items():
            ratios.add((self.pool, tenant, objective), ratio)
        return ratios

    def _gauge(self, name: str, text: str, value: float) -> Family:
        gauge = Family(f"tidegate_{name}", "gauge", text)
        gauge.add((self.pool,), value)
        return gauge
