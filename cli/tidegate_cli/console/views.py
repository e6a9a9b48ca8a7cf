"""What the pages show of pools and tenants, from what is known; pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tidegate_cli.console.fleet import Fleet, Json, Past, PublishedPolicy, Reports, condition
from tidegate_operator.usage import PoolActivity, TenantActivity, UsageMeter
from tidegate_policies.attainment import is_attained, measured, merged, num_counted
from tidegate_policies.rules import ServiceRule, StopPolicy, TenantRule, WatermarkRule
from tidegate_policies.wire import EngineReport, LatencyCounts, TenantCounters

NO_TIER = "no tier"
"""Where requests are shown whose tenant no policy declares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether something is as it should be, and why.

    Attributes:
        is_good: None while nobody has judged it.
    """

    is_good: bool | None
    word: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine.

    Attributes:
        is_silent: It is ready, says its pod, but hasn't reported; the figures are all 0 then.
        lag: Revisions behind the newest.
        trouble: In words; empty = none.
        step_seconds: Mean of the last while; None = no step, or not reported.
    """

    pod: str
    is_silent: bool = False
    revision: int = 0
    lag: int = 0
    trouble: str = ""
    kv_blocks: int = 0
    kv_used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    step_seconds: float | None = None

    @property
    def kv_percent(self) -> float:
        """Of its KV blocks, those in use."""
        return 100 * self.kv_used_blocks / self.kv_blocks if self.kv_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TierQueue:
    """Who waits in one tier: requests by tenant, of those that have any."""

    tier: str
    waiting: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """One pool.

    Attributes:
        ready: Ready engines of all, as `2/2`; empty while unknown.
        revision: Newest; 0 = none yet.
        batch: Requests running by tenant, of those that have any.
        queue: Of every tier, highest first.
        output_tokens_per_second: None while there is nothing to compare with.
    """

    name: str
    programmed: Verdict
    ready: str
    revision: int
    watermarks: WatermarkRule
    engines: tuple[EngineView, ...]
    batch: tuple[tuple[str, int], ...]
    queue: tuple[TierQueue, ...]
    output_tokens_per_second: float | None

    @property
    def laggards(self) -> list[str]:
        """Engines that don't run the newest revision."""
        return [engine.pod for engine in self.engines if engine.lag or engine.is_silent]

    @property
    def kv_percent(self) -> float:
        """Of all KV blocks, those in use."""
        blocks = sum(engine.kv_blocks for engine in self.engines)
        used = sum(engine.kv_used_blocks for engine in self.engines)
        return 100 * used / blocks if blocks else 0.0

    @property
    def step_seconds(self) -> float | None:
        """The longest of the engines' means."""
        known = [e.step_seconds for e in self.engines if e.step_seconds is not None]
        return max(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyView:
    """A latency against its target.

    Attributes:
        seconds: At the percentile, infinite = never; None = no traffic in the window.
    """

    target_seconds: float
    percentile: int
    seconds: float | None = None
    is_met: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantView:
    """One tenant in one pool.

    Attributes:
        ttft: None without a target.
        itl: None without a target.
        attained_percent: Of the requests in the window, those that met every target; None = none.
        share_percent: Of its tier's charged service in the last while; None = the tier had none.
        due_percent: What its weight gives it among the tenants of its tier with service or work.
        kv_percent: Of all KV blocks, those it holds.
        cost: Charged service since the engines started, in cost units.
    """

    pool: str
    tenant: str
    tier: str
    weight: int
    state: Verdict
    ttft: LatencyView | None
    itl: LatencyView | None
    attained_percent: int | None
    share_percent: float | None
    due_percent: float | None
    kv_percent: float
    nominal_percent: int
    activity: TenantActivity
    cost: float


def pool_views(fleet: Fleet) -> list[PoolView]:
    """Return every pool, by name."""
    return [_pool_view(fleet, name) for name in fleet.pool_names]


def tenant_views(fleet: Fleet) -> list[TenantView]:
    """Return every declared tenant of every pool: by pool, tier from the highest, name."""
    return [view for pool in fleet.pool_names for view in _tenants_of(fleet, pool)]


def activity_of(reports: Reports, past: Past | None) -> PoolActivity:
    """Return what a pool does, with rates over the time since `past`; they are 0 without it."""
    meter = UsageMeter()
    meter.sample(_began(reports, past) if past else (), now=0.0)
    activity = meter.sample(reports.values(), now=past.seconds if past else 1.0)
    return activity or PoolActivity()


def _began(reports: Reports, past: Past) -> list[EngineReport]:
    """Return the past reports, with nothing counted for tenants that came later."""
    began = []
    for pod, before in past.reports.items():
        now = reports.get(pod)
        newcomers: list[TenantCounters] = []
        if now is not None and now.incarnation == before.incarnation:
            known = {counters.tenant for counters in before.tenants}
            newcomers = [
                TenantCounters(tenant=c.tenant) for c in now.tenants if c.tenant not in known
            ]
        began.append(replace(before, tenants=(*before.tenants, *newcomers)))
    return began


def _pool_view(fleet: Fleet, name: str) -> PoolView:
    status = fleet.pools.get(name, {}).get("status", {})
    published = fleet.published.get(name)
    reports, past = fleet.reports.get(name, {}), fleet.past.get(name)
    revision = max(
        published.revision if published else 0, status.get("policy", {}).get("revision") or 0
    )
    activity = activity_of(reports, past)
    rate = sum(tenant.output_tokens_per_second for tenant in activity.tenants.values())
    return PoolView(
        name=name,
        programmed=_programmed(fleet, name),
        ready=status.get("engines", {}).get("summary") or "",
        revision=revision,
        watermarks=published.snapshot.watermarks if published else WatermarkRule(),
        engines=tuple(_engines(reports, past, status, revision)),
        batch=tuple((t, one.running) for t, one in activity.tenants.items() if one.running),
        queue=_queue(published, activity),
        output_tokens_per_second=rate if past else None,
    )


def _programmed(fleet: Fleet, name: str) -> Verdict:
    found = condition(fleet.pools.get(name, {}), "Programmed")
    if found is None:
        return Verdict(
            is_good=None, word="not judged yet" if name in fleet.pools else "state unknown"
        )
    is_good = found["status"] == "True"
    word = "Programmed" if is_good else found.get("reason") or "not Programmed"
    return Verdict(is_good=is_good, word=word, message=found.get("message", ""))


def _engines(
    reports: Reports, past: Past | None, status: Json, revision: int
) -> Iterator[EngineView]:
    silent = {pod for pod in status.get("laggards") or () if pod not in reports}
    for pod in sorted({*reports, *silent}):
        if pod in silent:
            yield EngineView(pod=pod, is_silent=True, trouble="no report")
            continue
        report = reports[pod]
        yield EngineView(
            pod=pod,
            revision=report.revision,
            lag=max(0, revision - report.revision),
            trouble=_trouble(report),
            kv_blocks=report.kv_blocks,
            kv_used_blocks=report.kv_used_blocks,
            running=report.running,
            waiting=report.waiting,
            swapped=report.swapped,
            step_seconds=_step_seconds(report, past.reports.get(pod) if past else None),
        )


def _trouble(report: EngineReport) -> str:
    if report.refused is not None:
        return f"refused revision {report.refused.revision}: {report.refused.message}"
    return "degraded: without Redis, or on a policy from its disk" if report.degraded else ""


def _step_seconds(report: EngineReport, before: EngineReport | None) -> float | None:
    if before is None or before.incarnation != report.incarnation:
        return None
    steps = report.steps - before.steps
    return (report.step_seconds - before.step_seconds) / steps if steps > 0 else None


def _queue(published: PublishedPolicy | None, activity: PoolActivity) -> tuple[TierQueue, ...]:
    snapshot = published.snapshot if published else None
    rules = snapshot.tenant_rules if snapshot else {}
    tiers: dict[str, dict[str, int]] = {t.name: {} for t in snapshot.tiers} if snapshot else {}
    for tenant, one in activity.tenants.items():
        if one.waiting:
            tier = rules[tenant].tier if tenant in rules else NO_TIER
            tiers.setdefault(tier, {})[tenant] = one.waiting
    return tuple(TierQueue(tier=t, waiting=tuple(by.items())) for t, by in tiers.items())


def _tenants_of(fleet: Fleet, pool: str) -> Iterator[TenantView]:
    published = fleet.published.get(pool)
    if published is None:
        return
    snapshot, reports = published.snapshot, fleet.reports.get(pool, {})
    activity = activity_of(reports, fleet.past.get(pool))
    standings, costs = _TierStandings(snapshot.tenants, activity), _costs(reports)
    values = snapshot.tier_values
    for rule in sorted(snapshot.tenants, key=lambda r: (-values[r.tier], r.tier, r.tenant)):
        own = activity.tenants.get(rule.tenant, TenantActivity())
        ttft, itl, attained = _service_level(rule.service, own)
        yield TenantView(
            pool=pool,
            tenant=rule.tenant,
            tier=rule.tier,
            weight=rule.weight,
            state=_state(rule, fleet.policies.get(rule.policy, {})),
            ttft=ttft,
            itl=itl,
            attained_percent=attained,
            share_percent=standings.share_percent(rule),
            due_percent=standings.due_percent(rule),
            kv_percent=100 * own.kv_used_blocks / activity.kv_blocks if activity.kv_blocks else 0,
            nominal_percent=rule.kv_nominal_percent,
            activity=own,
            cost=costs.get(rule.tenant, 0.0),
        )


def _costs(reports: Reports) -> dict[str, float]:
    costs: dict[str, float] = {}
    for report in reports.values():
        for counters in report.tenants:
            costs[counters.tenant] = costs.get(counters.tenant, 0.0) + counters.service
    return costs


class _TierStandings:
    """What the tenants of each tier got of its service, and what their weights give them."""

    def __init__(self, rules: Sequence[TenantRule], activity: PoolActivity) -> None:
        self._service: dict[str, float] = {}
        self._busy_weight: Counter[str] = Counter()
        self._tenants = activity.tenants
        for rule in rules:
            own = activity.tenants.get(rule.tenant)
            if own is not None and not own.is_idle:
                self._service[rule.tier] = self._service.get(rule.tier, 0.0) + own.service
                self._busy_weight[rule.tier] += rule.weight

    def share_percent(self, rule: TenantRule) -> float | None:
        total = self._service.get(rule.tier, 0.0)
        own = self._tenants.get(rule.tenant)
        return 100 * (own.service if own else 0.0) / total if total > 0 else None

    def due_percent(self, rule: TenantRule) -> float | None:
        own = self._tenants.get(rule.tenant)
        is_busy = own is not None and not own.is_idle
        weights = self._busy_weight[rule.tier] + (0 if is_busy else rule.weight)
        return 100 * rule.weight / weights if weights else None


def _state(rule: TenantRule, policy: Json) -> Verdict:
    if rule.stop is not StopPolicy.NONE:
        return Verdict(is_good=False, word=f"stopped: {rule.stop.value}")
    found = condition(policy, "Ready")
    if found is None:
        return Verdict(is_good=None, word="not judged yet" if policy else "unknown")
    word = "Ready" if found["status"] == "True" else found.get("reason") or "not Ready"
    return Verdict(is_good=found["status"] == "True", word=word, message=found.get("message", ""))


def _service_level(
    rule: ServiceRule, own: TenantActivity
) -> tuple[LatencyView | None, LatencyView | None, int | None]:
    total = merged(own.attainments, ttft_seconds=rule.ttft_seconds, itl_seconds=rule.itl_seconds)
    attained = 100 * total.met // total.requests if total and total.requests else None
    return (
        _latency(rule.ttft_seconds, rule.ttft_percentile, total.ttft if total else None),
        _latency(rule.itl_seconds, rule.itl_percentile, total.itl if total else None),
        attained,
    )


def _latency(
    target: float | None, percentile: int, counts: LatencyCounts | None
) -> LatencyView | None:
    if target is None:
        return None
    if counts is None or not num_counted(counts):
        return LatencyView(target_seconds=target, percentile=percentile)
    return LatencyView(
        target_seconds=target,
        percentile=percentile,
        seconds=measured(counts, percentile),
        is_met=is_attained(counts, percentile),
    )
