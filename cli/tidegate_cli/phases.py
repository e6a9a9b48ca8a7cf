"""Measures one phase of a run: what callers saw and what engines gave, between two moments."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_cli.engine_metrics import TenantTotals
from tidegate_cli.local import TENANTS, LocalTidegate
from tidegate_cli.report import Phase, Service, TenantPhase, Terms
from tidegate_cli.traffic import Call, summarize_calls


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All engines' totals at one moment of the event loop's time."""

    at: float
    totals: Mapping[str, TenantTotals]

    @property
    def service(self) -> float:
        """Charged service of all tenants, in cost units."""
        return sum(totals.service for totals in self.totals.values())


async def read_totals(tidegate: LocalTidegate) -> Reading:
    """Read the engines' counters now."""
    engines = (await tidegate.engine_metrics()).values()
    return Reading(
        at=asyncio.get_running_loop().time(),
        totals={
            tenant: TenantTotals(engines, f"{tidegate.namespace}/{tenant}") for tenant in TENANTS
        },
    )


async def read_terms(tidegate: LocalTidegate) -> dict[str, Terms]:
    """Read from the cluster on which terms each tenant is served."""
    listing = await tidegate.get("tenantpolicies")
    specs = {item["metadata"]["name"]: item["spec"] for item in listing["items"]}
    return {
        tenant: Terms(tier=specs[tenant]["priorityTier"], weight=specs[tenant]["weight"])
        for tenant in TENANTS
    }


def phase_between(
    name: str, first: Reading, last: Reading, *, calls: Sequence[Call], terms: Mapping[str, Terms]
) -> Phase:
    """Put together what happened between two readings."""
    return Phase(
        name=name,
        seconds=last.at - first.at,
        tenants=tuple(
            TenantPhase(
                tenant=tenant,
                terms=terms[tenant],
                calls=summarize_calls(calls, tenant, start=first.at, end=last.at),
                service=_service_between(first.totals[tenant], last.totals[tenant]),
            )
            for tenant in TENANTS
        ),
    )


def _service_between(first: TenantTotals, last: TenantTotals) -> Service:
    return Service(
        output_tokens=round(last.output_tokens - first.output_tokens),
        charged=last.service - first.service,
        preemptions=round(last.preemptions - first.preemptions),
    )
