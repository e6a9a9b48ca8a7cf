"""The policy that engines are measured under: one tenant may have everything."""

from tidegate_policies.rules import BatchingRule, ServiceRule, TenantRule, TierRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot

POOL = "bench/engine"
BENCH_TENANT = "bench"


def everything_for_one_tenant(
    max_num_seqs: int,
    *key_digests: str,
    itl_seconds: float | None = None,
    max_partial_prefills: int | None = None,
) -> PolicySnapshot:
    """Return the policy, with a bound of its own on the batch.

    Args:
        max_num_seqs: Most requests in one step.
        key_digests: SHA-256 (hex) of the tenant's API keys.
        itl_seconds: The tenant's target of the time between two tokens.
        max_partial_prefills: Prompts that may be half read at a time; None = the engine's own.
    """
    return PolicySnapshot.of(
        POOL,
        tiers=[TierRule(name="standard", value=0)],
        tenants=[
            TenantRule(
                tenant=BENCH_TENANT,
                policy=f"bench/{BENCH_TENANT}",
                tier="standard",
                # All KV up to the low watermark, so that nothing is borrowed.
                kv_nominal_percent=WatermarkRule().low_percent,
                key_digests=key_digests,
                service=ServiceRule(itl_seconds=itl_seconds),
            )
        ],
        batching=BatchingRule(max_num_seqs=max_num_seqs, max_partial_prefills=max_partial_prefills),
    )
