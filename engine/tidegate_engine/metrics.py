"""What the engine measures about itself, for Prometheus.

Tenant series exist for the tenants that the policy in force declares, and for `unknown`; those of
a tenant that is gone disappear. Totals come from the scheduler's own books at the time of the
scrape, so that they are exact and cost nothing per token, and are there from the start.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from tidegate_engine.events import EngineStats, PolicyApplied, StepReport
from tidegate_engine.executor.base import Capacity
from tidegate_engine.latencies import Latencies, TenantLatencies
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.text_format import Family, Histogram
from tidegate_engine.totals import Totals
from tidegate_policies.rules import UNKNOWN_TENANT, TenantRule, WatermarkRule

_STEP_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SCHEDULER_BUCKETS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 2e-2)
_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096)
_APPLY_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class Scrape:
    """What there was to show at one moment."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def render(self) -> bytes:
        """Write all series in Prometheus' text format.

        That may be done in any thread: totals don't change any more, and histograms are safe to
        read while they are observed.
        """
        return "".join(family.text() for family in self._families()).encode()


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
        self._step = Histogram(_STEP_BUCKETS)
        self._batch = Histogram(_SIZE_BUCKETS)
        self._scheduler = Histogram(_SCHEDULER_BUCKETS)
        self._apply = Histogram(_APPLY_BUCKETS)
        self._prefill = Histogram(_TOKEN_BUCKETS)
        self._decode = Histogram(_TOKEN_BUCKETS)
        self._latencies = Latencies(pool)
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
        totals = Totals(
            pool=self._pool,
            model=self._model,
            capacity=self._capacity,
            stats=stats,
            tenants=self._tenants,
            watermarks=self._watermarks,
            observed=(self._step_series, self._latencies.snapshot(at=at)),
            refused=dict(self._refused),
            miss_ratios=miss_ratios,
            rates_are_alone=rates_are_alone,
            overhead_ratio=self._scheduler_seconds / self._step_seconds
            if self._step_seconds
            else 0.0,
        )
        return Scrape(totals.collect)

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

    def _step_series(self) -> Iterator[Family]:
        for name, text, histogram in (
            ("step_seconds", "Time executing a step", self._step),
            ("step_batch_size", "Requests in a step", self._batch),
            ("scheduler_seconds", "Time planning and committing a step", self._scheduler),
            (
                "policy_apply_seconds",
                "Time from a policy's arrival in the engine to its effect",
                self._apply,
            ),
        ):
            family = Family(f"tidegate_{name}", "histogram", text)
            family.add_histogram((self._pool,), histogram)
            yield family
        tokens = Family(
            "tidegate_step_tokens", "histogram", "Tokens computed in a step", ("pool", "kind")
        )
        tokens.add_histogram((self._pool, "prefill"), self._prefill)
        tokens.add_histogram((self._pool, "decode"), self._decode)
        yield tokens
