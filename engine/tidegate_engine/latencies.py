"""How long requests wait and take: of each tenant in few buckets, of the whole pool in fine ones.

A tenant's histograms are there once it has something to observe: of thousands of tenants most are
silent, and four histograms are three fourths of a tenant's lines.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf

from tidegate_engine.text_format import Family, Histogram
from tidegate_engine.variance import TrafficVariance
from tidegate_policies.rules import UNKNOWN_TENANT, ServiceRule, TenantRule

# At most 8 each, the last one unbounded: every tenant has its own.
_QUEUE_BUCKETS = (0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0)
_TTFT_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 3.0, 10.0)
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 2.0)
_E2E_BUCKETS = (0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)


def _finer(bounds: Sequence[float]) -> tuple[float, ...]:
    """Return the same bounds with three more between any two of them, in even proportions."""
    found = [bounds[0]]
    for low, high in pairwise(bounds):
        found += [float(f"{low * (high / low) ** (part / 4):.2g}") for part in (1, 2, 3)]
        found.append(high)
    return tuple(found)


_KINDS = (
    ("queue", "from arrival to admission", _QUEUE_BUCKETS),
    ("ttft", "from arrival to the first token", _TTFT_BUCKETS),
    ("itl", "between two tokens of a request", _ITL_BUCKETS),
    ("e2e", "from arrival to the last token", _E2E_BUCKETS),
)


@dataclass(slots=True)
class _Objective:
    """One target of a tenant, and what was counted against it.

    Attributes:
        target_seconds: None = there is none any more; what was counted stays.
        percentile: Percent of what is observed that has to meet the target.
    """

    target_seconds: float | None
    percentile: int
    observed: int = 0
    missed: int = 0

    def observe(self, seconds: float) -> None:
        if self.target_seconds is not None:
            self.observed += 1
            self.missed += seconds > self.target_seconds


class TenantLatencies:
    """Where the times of one tenant's requests go; of one that is gone, to the pool alone."""

    __slots__ = ("_itl_objective", "_open", "_own", "_pool", "_queue_variance", "_ttft_objective")

    def __init__(
        self, pool: Sequence[Histogram], open_own: Callable[[], Sequence[Histogram]]
    ) -> None:
        self._pool = pool
        self._open = open_own
        self._own: Sequence[Histogram] | None = None
        self._queue_variance = TrafficVariance()
        self._ttft_objective = _Objective(None, 99)
        self._itl_objective = _Objective(None, 99)

    @property
    def own(self) -> Sequence[Histogram]:
        """Its own histograms in the order of kinds; none before the first observation."""
        return self._own or ()

    def obey(self, service: ServiceRule) -> None:
        """Count against these targets from now on."""
        ttft, itl = self._ttft_objective, self._itl_objective
        ttft.target_seconds, ttft.percentile = service.ttft_seconds, service.ttft_percentile
        itl.target_seconds, itl.percentile = service.itl_seconds, service.itl_percentile

    def admitted(self, seconds: float, *, at: float) -> None:
        """Observe how long a request has waited when it was first admitted."""
        self._queue_variance.observe(seconds, at=at)
        self._observe(0, seconds)

    def first_token(self, seconds: float) -> None:
        """Observe the time from arrival to the first token."""
        self._ttft_objective.observe(seconds)
        self._observe(1, seconds)

    def never_began(self) -> None:
        """Count a first token that won't come, as the engine has no room: its target is missed."""
        self._ttft_objective.observe(inf)

    def next_token(self, seconds: float) -> None:
        """Observe the time between two tokens."""
        self._itl_objective.observe(seconds)
        self._observe(2, seconds)

    def ended(self, seconds: float) -> None:
        """Observe the time from arrival to the last token."""
        self._observe(3, seconds)

    def objectives(self) -> Iterator[tuple[str, _Objective]]:
        """Yield what has a target, by name."""
        for name, objective in (("ttft", self._ttft_objective), ("itl", self._itl_objective)):
            if objective.target_seconds is not None:
                yield name, objective

    def queue_variance(self, *, at: float) -> dict[str, float]:
        """Return the variance of the time in the queue by window."""
        return self._queue_variance.values(at=at)

    def _observe(self, kind: int, seconds: float) -> None:
        self._pool[kind].observe(seconds)
        if self._own is None:
            self._own = self._open()
        for histogram in self._own[kind : kind + 1]:
            histogram.observe(seconds)


def _own_histograms() -> Sequence[Histogram]:
    return tuple(Histogram(buckets) for _, _, buckets in _KINDS)


class Latencies:
    """The times of all requests of an engine, and how long their prompts and outputs are."""

    def __init__(self, pool: str) -> None:
        self._pool_name = pool
        self._pool = tuple(Histogram(_finer(buckets)) for _, _, buckets in _KINDS)
        self._gone = TenantLatencies(self._pool, tuple)
        self._rules: dict[str, ServiceRule] = {}
        self._tenants: dict[str, TenantLatencies] = {}
        self._lengths = {"prompt": TrafficVariance(), "output": TrafficVariance()}
        self.declare(())

    def declare(self, rules: Iterable[TenantRule]) -> None:
        """Keep series for these tenants and `unknown` alone, and count against their targets."""
        self._rules = {rule.tenant: rule.service for rule in rules}
        self._rules[UNKNOWN_TENANT] = ServiceRule()
        for tenant in [name for name in self._tenants if name not in self._rules]:
            del self._tenants[tenant]
        for tenant, latencies in self._tenants.items():
            latencies.obey(self._rules[tenant])
        for tenant, rule in self._rules.items():
            if rule.ttft_seconds is not None or rule.itl_seconds is not None:
                self.of(tenant)

    def of(self, tenant: str) -> TenantLatencies:
        """Return where the times of a tenant's requests go."""
        if tenant not in self._rules:
            return self._gone
        if tenant not in self._tenants:
            latencies = self._tenants[tenant] = TenantLatencies(self._pool, _own_histograms)
            latencies.obey(self._rules[tenant])
        return self._tenants[tenant]

    def observe_length(self, kind: str, tokens: int, *, at: float) -> None:
        """Take in how long a prompt or an output is.

        Args:
            kind: `prompt` or `output`.
            tokens: Its length.
            at: The engine's clock.
        """
        self._lengths[kind].observe(tokens, at=at)

    def snapshot(self, *, at: float) -> Callable[[], Iterator[Family]]:
        """Return what yields all series as of now, in any thread."""
        return partial(self._collect, dict(self._tenants), at)

    def _collect(self, tenants: Mapping[str, TenantLatencies], at: float) -> Iterator[Family]:
        yield from self._histograms(tenants)
        yield from self._objectives(tenants)
        yield self._length_variances(at)
        yield self._queue_variances(tenants, at)

    def _histograms(self, tenants: Mapping[str, TenantLatencies]) -> Iterator[Family]:
        for kind, (name, text, _) in enumerate(_KINDS):
            own = Family(
                f"tidegate_{name}_seconds", "histogram", f"Time {text}", ("pool", "tenant")
            )
            for tenant, latencies in tenants.items():
                for histogram in latencies.own[kind : kind + 1]:
                    own.add_histogram((self._pool_name, tenant), histogram)
            yield own
            pool = Family(
                f"tidegate_pool_{name}_seconds",
                "histogram",
                f"Time {text}, of all tenants, in finer buckets",
            )
            pool.add_histogram((self._pool_name,), self._pool[kind])
            yield pool

    def _objectives(self, tenants: Mapping[str, TenantLatencies]) -> Iterator[Family]:
        labels = ("pool", "tenant", "objective")
        targets = Family(
            "tidegate_slo_target_seconds", "gauge", "Target of the tenant's service level", labels
        )
        shares = Family(
            "tidegate_slo_objective_ratio", "gauge", "Share that has to meet the target", labels
        )
        observed = Family(
            "tidegate_slo_observed_total",
            "counter",
            "First tokens (ttft) and times between tokens (itl) that have a target",
            labels,
        )
        missed = Family(
            "tidegate_slo_missed_total",
            "counter",
            "First tokens and times between tokens that missed their target, or that never came",
            labels,
        )
        for tenant, latencies in tenants.items():
            for name, objective in latencies.objectives():
                values = (self._pool_name, tenant, name)
                targets.add(values, objective.target_seconds or 0.0)
                shares.add(values, objective.percentile / 100)
                observed.add(values, objective.observed)
                missed.add(values, objective.missed)
        yield from (targets, shares, observed, missed)

    def _length_variances(self, at: float) -> Family:
        variances = Family(
            "tidegate_length_variance",
            "gauge",
            "Variance of prompt and output lengths in tokens, of 5 minutes and of the day;"
            " none while there is too little traffic to tell",
            ("pool", "kind", "window"),
        )
        for kind, traffic in self._lengths.items():
            for window, value in traffic.values(at=at).items():
                variances.add((self._pool_name, kind, window), value)
        return variances

    def _queue_variances(self, tenants: Mapping[str, TenantLatencies], at: float) -> Family:
        variances = Family(
            "tidegate_queue_time_variance",
            "gauge",
            "Variance of the time in the queue in seconds squared, of 5 minutes and of the day;"
            " none while there is too little traffic to tell",
            ("pool", "tenant", "window"),
        )
        for tenant, latencies in tenants.items():
            for window, value in latencies.queue_variance(at=at).items():
                variances.add((self._pool_name, tenant, window), value)
        return variances
