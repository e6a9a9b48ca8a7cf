"""What a run shows at its end: the tenants before and after, traffic lengths, memory."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from tidegate_cli.traces import LengthSummary
from tidegate_cli.traffic import CallFigures, Latency

TABLE_WIDTH = 122
"""What the widest table needs; a narrower terminal wraps its lines, which loses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a tenant was served."""

    tier: str
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a tenant got of the engines in one phase.

    Attributes:
        charged: Service in cost units: prompt tokens, and output tokens twice.
    """

    output_tokens: int
    charged: float
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPhase:
    """One tenant in one phase: its terms, what its callers saw, what the engines gave it."""

    tenant: str
    terms: Terms
    calls: CallFigures
    service: Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """All tenants between two moments."""

    name: str
    seconds: float
    tenants: tuple[TenantPhase, ...]

    def tier_shares(self) -> dict[str, tuple[float, float]]:
        """Return per tenant: its share of what its tier got, and its share of the tier's weight.

        Both in percent. Shares are compared inside a tier, where weights apply.
        """
        charged: dict[str, float] = defaultdict(float)
        weights: dict[str, int] = defaultdict(int)
        for one in self.tenants:
            charged[one.terms.tier] += one.service.charged
            weights[one.terms.tier] += one.terms.weight
        return {
            one.tenant: (
                _percent(one.service.charged, charged[one.terms.tier]),
                _percent(one.terms.weight, weights[one.terms.tier]),
            )
            for one in self.tenants
        }

    def total_shares(self) -> dict[str, float]:
        """Return per tenant: its share of all service, in percent."""
        total = sum(one.service.charged for one in self.tenants)
        return {one.tenant: _percent(one.service.charged, total) for one in self.tenants}


def phases_table(phases: Sequence[Phase]) -> Table:
    """Lay the phases out with each tenant's rows together, so that the change meets the eye."""
    table = Table(
        title="Per tenant, before and after the change",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for heading in ("tenant", "phase", "tier", "weight"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "sent",
        "done",
        "TTFT p50",
        "TTFT p99",
        "ITL p99",
        "output\ntokens",
        "share\nof all",
        "share in tier\n(by weight)",
        "pre-\nempted",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for same_tenant in zip(*(phase.tenants for phase in phases), strict=True):
        for phase, one in zip(phases, same_tenant, strict=True):
            table.add_row(*_row(phase, one), end_section=phase is phases[-1])
    return table


def lengths_table(plans: Mapping[str, LengthSummary]) -> Table:
    """Show how long the requests are."""
    table = Table(title="Traffic, lengths in tokens", box=box.SIMPLE_HEAD)
    table.add_column("tenant")
    for heading in ("n", "prompt p50", "prompt p95", "output p50", "output p95"):
        table.add_column(heading, justify="right")
    for name, plan in plans.items():
        table.add_row(
            name,
            str(plan.count),
            str(plan.prompt_p50),
            str(plan.prompt_p95),
            str(plan.output_p50),
            str(plan.output_p95),
        )
    return table


def memory_table(megabytes: Mapping[str, float]) -> Table:
    """Show the resident memory of every process."""
    table = Table(title="Resident memory", box=box.SIMPLE_HEAD)
    table.add_column("process")
    table.add_column("MB", justify="right")
    for name, size in megabytes.items():
        table.add_row(name, f"{size:.0f}")
    table.add_section()
    table.add_row("all", f"{sum(megabytes.values()):.0f}")
    return table


def figures_table(title: str, figures: Mapping[str, float]) -> Table:
    """Show named numbers."""
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}")
    return table


def latency_text(latency: Latency | None) -> str:
    """Write a latency for people: `35 ms`, `1.20 s`, `>=8.0 s` where some still wait, or `-`."""
    if latency is None:
        return "-"
    sign = ">=" if latency.at_least else ""
    if latency.seconds < 0.9995:
        return f"{sign}{latency.seconds * 1000:.0f} ms"
    return f"{sign}{latency.seconds:.{2 if latency.seconds < 10 else 1}f} s"


def _row(phase: Phase, one: TenantPhase) -> tuple[str, ...]:
    got, due = phase.tier_shares()[one.tenant]
    return (
        one.tenant,
        phase.name,
        one.terms.tier,
        str(one.terms.weight),
        str(one.calls.sent),
        str(one.calls.finished),
        latency_text(one.calls.ttft_p50),
        latency_text(one.calls.ttft_p99),
        latency_text(one.calls.itl_p99),
        str(one.service.output_tokens),
        f"{phase.total_shares()[one.tenant]:.0f} %",
        f"{got:.0f} % ({due:.0f} %)",
        str(one.service.preemptions),
    )


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0
