"""Policy snapshots with harmless defaults."""

from collections.abc import Mapping

from tidegate_policies.rules import (
    BatchingRule,
    DrainRule,
    KvEstimate,
    TenantRule,
    TierRule,
    UnknownTenantsRule,
    WatermarkRule,
)
from tidegate_policies.snapshot import PolicySnapshot

POOL = "serving/main"


def a_tenant(name: str = "acme", *, tier: str = "standard", **fields: object) -> TenantRule:
    """Build a tenant's rule; `fields` are those of `TenantRule`."""
    rule: dict[str, object] = {"tenant": name, "policy": f"teams/{name}", "tier": tier, **fields}
    return TenantRule(**rule)  # type: ignore[arg-type]


def a_snapshot(
    *tenants: TenantRule,
    tiers: Mapping[str, int | TierRule] | None = None,
    batching: BatchingRule | None = None,
    watermarks: WatermarkRule | None = None,
    unknown_tenants: UnknownTenantsRule | None = None,
    kv_estimate: KvEstimate = KvEstimate.PREDICTED,
    drain: DrainRule | None = None,
) -> PolicySnapshot:
    """Build a snapshot; without `tiers` there is one, "standard", of value 0.

    Tiers are given by their values, or by whole rules under the same name.
    """
    values: Mapping[str, int | TierRule] = {"standard": 0} if tiers is None else tiers
    return PolicySnapshot.of(
        POOL,
        tiers=[
            tier if isinstance(tier, TierRule) else TierRule(name=name, value=tier)
            for name, tier in values.items()
        ],
        tenants=tenants or [a_tenant()],
        batching=batching,
        watermarks=watermarks,
        unknown_tenants=unknown_tenants,
        kv_estimate=kv_estimate,
        drain=drain,
    )
