"""The sides that `tidegate bench isolation` compares, each as a policy of the product's scheduler.

So all have chunked prefill, the prefix cache and the same KV: what differs is whom they serve next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_cli.bench.engine_policy import POOL
from tidegate_cli.bench.isolation_load import BRONZE, TIER_VALUES, Label
from tidegate_cli.bench.isolation_side import FCFS, PRIORITY, SideName
from tidegate_policies.rules import PreemptionRule, ServiceRule, TenantRule, TierRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot

BRONZE_PERCENT = 10
"""Of the service, kept for bronze while it has work."""

MAX_PREEMPTIONS = 20
"""Times that a request may be taken out: it goes on where it stopped, which costs little."""

_EVERYBODY = "everybody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A policy, and which of its tenants each label's requests are sent as."""

    policy: PolicySnapshot
    renamed: Mapping[str, str]

    def with_keys(self, digests: Mapping[str, str]) -> PolicySnapshot:
        """Return the policy with the SHA-256 of an API key for each of its tenants."""
        tenants = [
            replace(rule, key_digests=(digests[rule.tenant],)) for rule in self.policy.tenants
        ]
        return replace(self.policy, tenants=tuple(tenants))


def side_of(name: SideName, labels: Sequence[Label], *, itl_seconds: float | None) -> Side:
    """Return the policy of a side.

    Args:
        name: Which.
        labels: The tenants.
        itl_seconds: Gold's target of the time between two tokens; None = nobody has one.
    """
    if name == FCFS:
        return _fcfs(labels)
    return _priority(labels) if name == PRIORITY else _tidegate(labels, itl_seconds)


def _tidegate(labels: Sequence[Label], itl_seconds: float | None) -> Side:
    return Side(
        policy=PolicySnapshot.of(
            POOL,
            tiers=[
                TierRule(
                    name=tier,
                    value=value,
                    reserved_share_percent=BRONZE_PERCENT if tier == BRONZE else 0,
                )
                for tier, value in TIER_VALUES.items()
            ],
            tenants=[
                TenantRule(
                    tenant=label.tenant,
                    policy=f"bench/{label.tenant}",
                    tier=label.tier,
                    weight=label.weight,
                    kv_nominal_percent=label.nominal_percent,
                    max_running=label.max_running,
                    preemption=PreemptionRule(
                        max_preemptions=MAX_PREEMPTIONS, min_quantum_tokens=label.quantum_tokens
                    ),
                    service=ServiceRule(
                        ttft_seconds=label.ttft_seconds,
                        itl_seconds=(
                            itl_seconds * label.itl_factor if itl_seconds is not None else None
                        ),
                        sheds=label.sheds,
                    ),
                )
                for label in labels
            ],
        ),
        renamed={label.tenant: label.tenant for label in labels},
    )


def _fcfs(labels: Sequence[Label]) -> Side:
    return Side(
        policy=PolicySnapshot.of(
            POOL,
            tiers=[TierRule(name=_EVERYBODY, value=0)],
            tenants=[_plain_tenant(_EVERYBODY, nominal_percent=WatermarkRule().low_percent)],
        ),
        renamed={label.tenant: _EVERYBODY for label in labels},
    )


def _priority(labels: Sequence[Label]) -> Side:
    tiers = [tier for tier in TIER_VALUES if any(label.tier == tier for label in labels)]
    return Side(
        policy=PolicySnapshot.of(
            POOL,
            tiers=[
                TierRule(name=tier, value=TIER_VALUES[tier], preempts_lower=False) for tier in tiers
            ],
            # All KV is there for whoever comes first: nobody has any of its own to take back.
            tenants=[_plain_tenant(tier, nominal_percent=0) for tier in tiers],
        ),
        renamed={label.tenant: label.tier for label in labels},
    )


def _plain_tenant(tier: str, *, nominal_percent: int) -> TenantRule:
    return TenantRule(
        tenant=tier,
        policy=f"bench/{tier}",
        tier=tier,
        kv_nominal_percent=nominal_percent,
        preemption=PreemptionRule(reclaims=False),
    )
