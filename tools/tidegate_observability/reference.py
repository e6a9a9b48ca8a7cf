"""The metrics reference, from what engine and operator really expose."""

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.events import CancelCause, CancelKey, EngineStats
from tidegate_engine.executor.base import Capacity
from tidegate_engine.metrics import EngineMetrics
from tidegate_engine.policy_board import PolicyInForce
from tidegate_operator.metrics import Metrics
from tidegate_policies.rules import ServiceRule, StopPolicy, TenantRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot

_TENANT = "teams/acme"
_POOL = "serving/chat"
_MADE_BY_THE_FORMAT = frozenset({"le"})
_HEAD = """\
# Metrics

Made by `make generate` from what engine and operator expose; don't edit.

Engines serve `/metrics` on their API's port, the operator on `TIDEGATE_OPERATOR_METRICS_PORT`.
`pool` is `namespace/name` of the EnginePool. Series with the label `tenant` exist for the tenants
that the policy in force declares, and for `unknown`; those of a tenant that is deleted are gone
with the policy that no longer names it. Counters start at 0 with each process. Histograms also have
`_sum` and `_count`; those with a `tenant` have at most 8 buckets.

The series that begin with `vllm:` are those by which the endpoint picker of the Gateway API
inference extension chooses an engine, under the names that it looks for by default.
"""


class UnseenSeriesError(ValueError):
    """Nothing is known of a metric's labels, as the page's engine has no series of it.

    Attributes:
        name: Of the metric.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: let what it counts happen in the engine of the reference")
        self.name = name


def reference() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_section("Engine", _engine()), *_section("Operator", _operator())])


def _section(title: str, families: Iterable[Metric]) -> list[str]:
    rows = [
        f"| {_name(family)} | {family.type} | {_labels(family)} | {_text(family)} |"
        for family in sorted(families, key=lambda family: family.name)
    ]
    return [
        f"## {title}",
        "",
        "| name | type | labels | what it says |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _name(family: Metric) -> str:
    suffix = "_total" if family.type == "counter" else ""
    return f"`{family.name}{suffix}`"


def _labels(family: Metric) -> str:
    if not family.samples:
        raise UnseenSeriesError(family.name)
    names = sorted({name for sample in family.samples for name in sample.labels})
    return ", ".join(f"`{name}`" for name in names if name not in _MADE_BY_THE_FORMAT)


def _text(family: Metric) -> str:
    return family.documentation.rstrip(".").replace("|", "\\|")


def _engine() -> list[Metric]:
    """Return all families of an engine in which everything has happened that is counted."""
    rule = TenantRule(
        tenant=_TENANT,
        policy=_TENANT,
        tier="standard",
        service=ServiceRule(ttft_seconds=1.0, itl_seconds=0.1),
        stop=StopPolicy.DRAIN,
    )
    snapshot = PolicySnapshot.of(_POOL, tiers=[TierRule(name="standard", value=0)], tenants=[rule])
    capacity = Capacity(num_blocks=64, num_host_blocks=64, block_size=16)
    metrics = EngineMetrics(_POOL, model="model", capacity=capacity)
    metrics.use_policy(PolicyInForce(snapshot=snapshot, revision=1, digest="", step=1, at=0.0))
    for _ in range(10):
        metrics.observe_length("prompt", 100, at=0.0)
        metrics.latencies(_TENANT).admitted(0.1, at=0.0)
    metrics.count_refusal(_TENANT, "queue_full")
    scheduler = Scheduler(num_blocks=64, block_size=16, limits=EngineLimits())
    scheduler.apply_policy(snapshot, 1)
    scheduler.plan_step(0.0)
    cancelled = CancelKey(tenant=_TENANT, cause=CancelCause.DISCONNECT, state="running")
    counted = scheduler.stats()
    stopped = replace(counted.tenants[_TENANT], stop_seconds=0.1)
    stats = EngineStats(
        scheduler=replace(counted, tenants={_TENANT: stopped}),
        cancelled=MappingProxyType({cancelled: 1}),
        tokens_after_cancel=0,
        step_costs=ExecutorCosts(),
    )
    text = (
        metrics.scrape(stats, miss_ratios={(_TENANT, "ttft"): 0.0}, rates_are_alone=False, at=0.0)
        .render()
        .decode()
    )
    return _families(text)


def _operator() -> list[Metric]:
    metrics = Metrics()
    metrics.compile_seconds.labels(_POOL).observe(0.01)
    metrics.propagation_seconds.labels(_POOL).observe(0.1)
    metrics.engines.labels(_POOL, "ready").set(1)
    metrics.status_writes.labels("TenantPolicy", "ok").inc()
    metrics.published.labels(_POOL).inc()
    for signal in metrics.demand.values():
        signal.labels("serving", "main").set(0)
    return _families(generate_latest(metrics.registry).decode())


def _families(text: str) -> list[Metric]:
    # When a series began is no metric of its own.
    families = text_string_to_metric_families(text)
    return [family for family in families if not family.name.endswith("_created")]
