"""What tenants use: rates from the totals that engines report, and how a status says them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate_operator.resources import duration_text
from tidegate_operator.verdicts import Json
from tidegate_policies.attainment import quantile
from tidegate_policies.rules import TenantRule
from tidegate_policies.wire import Attainment, EngineReport, TenantCounters

MAX_QUEUE_SECONDS = 86_400.0
"""No request may wait longer: what says so is a broken clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantActivity:
    """One tenant in one pool, over the last sampling window.

    Attributes:
        kv_borrowed_blocks: Of `kv_used_blocks`, those above the nominal of each engine.
        output_tokens_per_second: Mean over the window.
        service: Charged service in the window.
        prompt_tokens: Computed since the engines started; as are all totals below.
        kv_seconds: KV blocks times the seconds that they were held.
        shed_in_window: Of these, those of the last sampling window.
        stop_seconds: The longest time that an engine took from the arrival of the policy that stops
            the tenant to its last KV block free; None while it isn't stopped, or has any left.
        attainments: Of each engine where the tenant has a service level and traffic.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_used_blocks: int = 0
    kv_borrowed_blocks: int = 0
    output_tokens_per_second: float = 0.0
    service: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    kv_seconds: float = 0.0
    preempted: int = 0
    cancelled: int = 0
    shed: int = 0
    shed_in_window: int = 0
    stop_seconds: float | None = None
    attainments: tuple[Attainment, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether the engines have counted nothing of the tenant."""
        tokens = self.prompt_tokens + self.cached_tokens + self.output_tokens
        return not (tokens or self.kv_seconds or self.cancelled or self.shed)

    @property
    def is_idle(self) -> bool:
        """Whether the tenant sent no work in the window and has none now."""
        work = self.running or self.waiting or self.swapped
        return not (work or self.kv_used_blocks or self.service or self.shed_in_window)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolActivity:
    """A pool over the last sampling window.

    Attributes:
        queue_time_p99: Seconds, of the last minute; 0 = nobody waited, or nobody came.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    queue_time_p99: float = 0.0
    tenants: Mapping[str, TenantActivity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ActivityInForce:
    """What one policy's tenant does in a pool where the policy is in force, and it was seen.

    Attributes:
        pool: All of the pool.
        rules: Of all of the pool's tenants.
        tenant: The policy's.
    """

    pool: PoolActivity
    rules: Mapping[str, TenantRule]
    tenant: str

    @property
    def own(self) -> TenantActivity:
        """The tenant's part."""
        return self.pool.tenants[self.tenant]

    @property
    def attainments(self) -> tuple[Attainment, ...]:
        """Of every engine where the tenant has a service level and traffic."""
        return self.own.attainments

    @property
    def tier_service(self) -> float:
        """Charged service of all tenants of its tier, in the sampling window."""
        tier = self.rules[self.tenant].tier
        return sum(
            activity.service
            for tenant, activity in self.pool.tenants.items()
            if tenant in self.rules and self.rules[tenant].tier == tier
        )


class UsageMeter:
    """Turns the growing totals of a pool's engines into rates, one window after the other."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._totals: dict[tuple[str, str, str], TenantCounters] = {}

    def sample(self, reports: Iterable[EngineReport], *, now: float) -> PoolActivity | None:
        """Close the window that began with the last call; None for the first call.

        Args:
            reports: The fresh reports of the pool's ready engines.
            now: Seconds of a clock that never goes back.
        """
        reports = list(reports)
        began = self._time
        totals = {
            (report.pod, report.incarnation, counters.tenant): counters
            for report in reports
            for counters in report.tenants
        }
        by_tenant: dict[str, list[tuple[TenantCounters, TenantCounters | None]]] = {}
        for key, counters in totals.items():
            # An engine that is new in this window has no window yet: its totals may be old.
            by_tenant.setdefault(counters.tenant, []).append((counters, self._totals.get(key)))
        self._time, self._totals = now, totals
        if began is None or now <= began:
            return None
        return PoolActivity(
            running=sum(report.running for report in reports),
            waiting=sum(report.waiting for report in reports),
            swapped=sum(report.swapped for report in reports),
            kv_blocks=sum(report.kv_blocks for report in reports),
            kv_used_blocks=sum(report.kv_used_blocks for report in reports),
            queue_time_p99=queue_time_p99(reports),
            tenants={
                tenant: _activity(pairs, now - began) for tenant, pairs in sorted(by_tenant.items())
            },
        )


def _activity(
    pairs: list[tuple[TenantCounters, TenantCounters | None]], seconds: float
) -> TenantActivity:
    now = [counters for counters, _ in pairs]
    grown = [(new, old) for new, old in pairs if old is not None]
    tokens = sum(new.output_tokens - old.output_tokens for new, old in grown)
    return TenantActivity(
        running=sum(counters.running for counters in now),
        waiting=sum(counters.waiting for counters in now),
        swapped=sum(counters.swapped for counters in now),
        kv_used_blocks=sum(counters.kv_used_blocks for counters in now),
        kv_borrowed_blocks=sum(counters.kv_borrowed_blocks for counters in now),
        output_tokens_per_second=tokens / seconds,
        service=sum(new.service - old.service for new, old in grown),
        prompt_tokens=sum(counters.prompt_tokens for counters in now),
        cached_tokens=sum(counters.cached_tokens for counters in now),
        output_tokens=sum(counters.output_tokens for counters in now),
        recomputed_tokens=sum(counters.recomputed_tokens for counters in now),
        kv_seconds=sum(counters.kv_seconds for counters in now),
        preempted=sum(counters.preempted for counters in now),
        cancelled=sum(counters.cancelled for counters in now),
        shed=sum(counters.shed for counters in now),
        stop_seconds=_longest([counters.stop_seconds for counters in now]),
        shed_in_window=sum(new.shed - old.shed for new, old in grown),
        attainments=tuple(c.attainment for c in now if c.attainment is not None),
    )


def pool_usage(activity: PoolActivity) -> Json:
    """Return the `status.usage` of a pool."""
    return {
        "running": activity.running,
        "waiting": activity.waiting,
        "swapped": activity.swapped,
        "kvPercent": _percent(activity.kv_used_blocks, activity.kv_blocks),
        "queueTimeP99": duration_text(activity.queue_time_p99),
    }


def queue_time_p99(reports: Iterable[EngineReport]) -> float:
    """Return the 99th percentile of the time in the queue, in seconds; 0 where nobody queued."""
    buckets = (bucket for report in reports for bucket in report.queue_times)
    return min(quantile(buckets, 99) or 0.0, MAX_QUEUE_SECONDS)


def tenant_usage(pools: Sequence[ActivityInForce]) -> Json | None:
    """Return the `status.usage` of a policy; None before it has any.

    At rest nothing of it changes, so that rest costs nothing.
    """
    activities = [one.own for one in pools]
    if all(activity.is_idle and activity.is_new for activity in activities):
        return None
    blocks = sum(one.pool.kv_blocks for one in pools)
    tokens = sum(activity.output_tokens_per_second for activity in activities)
    service = sum(activity.service for activity in activities)
    stop_seconds = _longest([activity.stop_seconds for activity in activities])
    return {
        **({} if stop_seconds is None else {"stopTime": duration_text(stop_seconds)}),
        "running": sum(activity.running for activity in activities),
        "waiting": sum(activity.waiting for activity in activities),
        "swapped": sum(activity.swapped for activity in activities),
        "kvPercent": _percent(sum(a.kv_used_blocks for a in activities), blocks),
        "borrowedPercent": _percent(sum(a.kv_borrowed_blocks for a in activities), blocks),
        "outputTokensPerSecond": _rounded(tokens),
        "sharePercent": _percent(service, sum(one.tier_service for one in pools)),
        "promptTokens": sum(activity.prompt_tokens for activity in activities),
        "cachedTokens": sum(activity.cached_tokens for activity in activities),
        "outputTokens": sum(activity.output_tokens for activity in activities),
        "recomputedTokens": sum(activity.recomputed_tokens for activity in activities),
        "kvSeconds": round(sum(activity.kv_seconds for activity in activities)),
        "shed": sum(activity.shed for activity in activities),
        "preempted": sum(activity.preempted for activity in activities),
        "cancelled": sum(activity.cancelled for activity in activities),
    }


def _longest(seconds: Sequence[float | None]) -> float | None:
    """Return the longest time; None unless all are known."""
    known = [one for one in seconds if one is not None]
    return max(known) if known and len(known) == len(seconds) else None


def _percent(part: float, whole: float) -> int:
    return max(0, min(100, round(100 * part / whole))) if whole > 0 else 0


def _rounded(rate: float) -> int:
    """Keep two digits: the noise below them is not worth a write."""
    return int(float(f"{max(rate, 0.0):.2g}"))
