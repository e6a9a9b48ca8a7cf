"""One resource, one rule: how what people write is said to engines.

Nothing is looked up here, and nothing is compared with other objects.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from tidegate_operator.cluster import PodView
from tidegate_operator.resources import (
    Batching,
    EnginePool,
    OnOverload,
    PreemptionPolicySpec,
    PrefixCache,
    PriorityTier,
    RateLimit,
    Reclaim,
    ServiceLevelSpec,
    TenantPolicy,
    TierPreemption,
    duration_seconds,
)
from tidegate_operator.verdicts import Flaw, Reason
from tidegate_policies.rules import (
    BatchingRule,
    DrainRule,
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    RateRule,
    ServiceRule,
    StopPolicy,
    TenantRule,
    TierRule,
    UnknownAction,
    UnknownTenantsRule,
    WatermarkRule,
)

_NO_PROMISE = ServiceRule()
_NO_LIMIT = RateRule()

# Thousands of policies have the same few tiers.
_tier_rule = lru_cache(maxsize=1024)(TierRule)


def tier_rule(tier: PriorityTier) -> TierRule:
    """Return the rule of a tier, with all of the share that it wants reserved."""
    spec = tier.spec
    return _tier_rule(
        name=tier.metadata.name,
        value=spec.value,
        reserved_share_percent=spec.reserved_share_percent,
        preempts_lower=spec.preemption is TierPreemption.PREEMPT_LOWER,
        wait_window_seconds=_seconds(spec.wait_window),
    )


def preemption_rule(spec: PreemptionPolicySpec) -> PreemptionRule:
    """Return the rule of preemption, given inline or in a PreemptionPolicy."""
    return PreemptionRule(
        preemptible=spec.preemptible,
        mode=PreemptionMode(spec.mode),
        max_preemptions=spec.max_preemptions_per_request,
        min_quantum_tokens=spec.min_quantum_tokens,
        reclaims=spec.reclaim is Reclaim.ALWAYS,
    )


def service_rule(spec: ServiceLevelSpec) -> ServiceRule:
    """Return what was promised, inline or in a ServiceLevel."""
    return ServiceRule(
        ttft_seconds=_seconds(spec.ttft.target if spec.ttft else None),
        itl_seconds=_seconds(spec.itl.target if spec.itl else None),
        queue_timeout_seconds=_seconds(spec.queue_timeout),
        request_timeout_seconds=_seconds(spec.request_timeout),
        sheds=spec.on_overload is OnOverload.SHED,
        ttft_percentile=spec.ttft.percentile if spec.ttft else _NO_PROMISE.ttft_percentile,
        itl_percentile=spec.itl.percentile if spec.itl else _NO_PROMISE.itl_percentile,
        window_seconds=duration_seconds(spec.window),
    )


def rate_rule(spec: RateLimit | None) -> RateRule:
    """Return what a tenant may use a minute."""
    if spec is None:
        return _NO_LIMIT
    return RateRule(
        requests_per_minute=spec.requests_per_minute,
        tokens_per_minute=spec.tokens_per_minute,
        burst_percent=spec.burst_percent,
    )


def tenant_rule(
    policy: TenantPolicy,
    *,
    tier: str,
    allowed_tiers: Sequence[str],
    preemption: PreemptionRule,
    service: ServiceRule,
    key_digests: Sequence[str],
    has_quota: bool,
) -> TenantRule:
    """Return the rule of a tenant.

    A stopped tenant keeps its rule and its keys: without them its requests would be those of
    nobody, which a pool may admit.
    """
    spec = policy.spec
    concurrency = spec.concurrency
    return TenantRule(
        tenant=policy.tenant,
        policy=policy.metadata.qualified_name,
        tier=tier,
        allowed_tiers=tuple(allowed_tiers),
        weight=spec.weight,
        kv_nominal_percent=spec.kv.nominal_percent if has_quota else 0,
        kv_borrowing_limit_percent=spec.kv.borrowing_limit_percent,
        kv_lendable_percent=spec.kv.lendable_percent,
        max_running=concurrency.max_running if concurrency else None,
        max_queued=concurrency.max_queued if concurrency else None,
        max_queued_tokens=concurrency.max_queued_tokens if concurrency else None,
        max_prompt_tokens=spec.limits.max_prompt_tokens,
        max_output_tokens=spec.limits.max_output_tokens,
        rate=rate_rule(spec.rate),
        cancel_on_disconnect=spec.cancel_on_disconnect,
        shares_prefixes=spec.prefix_cache is PrefixCache.SHARED,
        preemption=preemption,
        service=service,
        stop=StopPolicy(spec.stop_policy),
        key_digests=tuple(key_digests),
    )


def batching_rule(pool: EnginePool) -> BatchingRule:
    """Return how batches are formed, without the prefill chunk where it contradicts itself."""
    spec = pool.spec.batching
    chunk = spec.prefill_chunk if _is_chunk_possible(spec) else None
    return BatchingRule(
        max_num_seqs=spec.max_num_seqs,
        max_batched_tokens=spec.max_batched_tokens,
        wait_window_seconds=_seconds(spec.wait_window),
        prefill_chunk_min=chunk.min if chunk else None,
        prefill_chunk_max=chunk.max if chunk else None,
        max_partial_prefills=spec.max_partial_prefills,
    )


def watermark_rule(pool: EnginePool) -> WatermarkRule:
    """Return the pool's watermarks, or the defaults where the stored ones contradict each other."""
    marks = pool.spec.kv.watermarks
    if not 0 < marks.low_percent < marks.high_percent < 100:
        return WatermarkRule()
    return WatermarkRule(low_percent=marks.low_percent, high_percent=marks.high_percent)


def kv_estimate(pool: EnginePool) -> KvEstimate:
    """Return how much KV the pool's engines expect a request to need."""
    return KvEstimate(pool.spec.kv.estimate)


def drain_rule(pool: EnginePool, pods: Sequence[PodView]) -> DrainRule:
    """Return which engines are to take no new work, and how long they have."""
    draining = sorted(pod.name for pod in pods if pod.draining)
    return DrainRule(engines=tuple(draining), seconds=_seconds(pool.spec.drain.timeout))


def unknown_tenants_rule(pool: EnginePool, tier: str) -> UnknownTenantsRule:
    """Leave out what a refusal doesn't need: a change that no engine notices is no revision."""
    rule = pool.spec.unknown_tenants
    if UnknownAction(rule.action) is UnknownAction.REJECT:
        return UnknownTenantsRule()
    return UnknownTenantsRule(
        action=UnknownAction.ADMIT, tier=tier, weight=rule.weight, max_running=rule.max_running
    )


def pool_flaws(pool: EnginePool) -> Iterator[Flaw]:
    """Yield what contradicts itself in a spec that was stored before the API server refused it."""
    stored, rule = pool.spec.kv.watermarks, watermark_rule(pool)
    if (stored.low_percent, stored.high_percent) != (rule.low_percent, rule.high_percent):
        yield Flaw(
            Reason.INVALID,
            f"spec.kv.watermarks: lowPercent {stored.low_percent} must be below highPercent"
            f" {stored.high_percent}; {rule.low_percent} and {rule.high_percent} apply",
        )
    if not _is_chunk_possible(pool.spec.batching):
        yield Flaw(
            Reason.INVALID,
            "spec.batching.prefillChunk: min must be at most max, and neither may exceed"
            " maxBatchedTokens; the engine's own limits apply",
        )


def _is_chunk_possible(batching: Batching) -> bool:
    chunk = batching.prefill_chunk
    if chunk is None:
        return True
    limits = [n for n in (chunk.min, chunk.max, batching.max_batched_tokens) if n is not None]
    return limits == sorted(limits)


def _seconds(duration: str | None) -> float | None:
    return None if duration is None else duration_seconds(duration)
