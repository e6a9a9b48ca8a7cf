"""What tenants use: rates from the totals that engines report."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidegate_policies.wire import EngineReport, TenantCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantActivity:
    """One tenant in one pool, over the last sampling window.

    Attributes:
        kv_borrowed_blocks: Of `kv_used_blocks`, those above the nominal of each engine.
        output_tokens_per_second: Mean over the window.
        service: Charged service in the window.
        preempted: Total since the engines started.
        cancelled: Total since the engines started.
    """

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_used_blocks: int = 0
    kv_borrowed_blocks: int = 0
    output_tokens_per_second: float = 0.0
    service: float = 0.0
    preempted: int = 0
    cancelled: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether the tenant had no work in the window and has none now."""
        work = self.running or self.waiting or self.swapped
        return not (work or self.kv_used_blocks or self.service)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolActivity:
    """A pool over the last sampling window."""

    running: int = 0
    waiting: int = 0
    swapped: int = 0
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    tenants: Mapping[str, TenantActivity] = field(default_factory=dict)


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
        preempted=sum(counters.preempted for counters in now),
        cancelled=sum(counters.cancelled for counters in now),
    )
