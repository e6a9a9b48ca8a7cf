import pytest

from tidegate_operator.resources import EnginePool, PreemptionPolicySpec, ServiceLevelSpec
from tidegate_operator.rules import (
    batching_rule,
    kv_estimate,
    pool_flaws,
    preemption_rule,
    service_rule,
    tenant_rule,
    tier_rule,
    unknown_tenants_rule,
)
from tidegate_policies.rules import (
    BatchingRule,
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
)
from tidegate_testing.manifests import full_manifest
from tidegate_testing.objects import a_tenant_policy, a_tier, an_engine_pool

PREEMPTION = PreemptionRule(
    preemptible=False,
    mode=PreemptionMode.SWAP,
    max_preemptions=5,
    min_quantum_tokens=32,
    reclaims=False,
)
SERVICE = ServiceRule(
    ttft_seconds=0.5,
    itl_seconds=0.04,
    queue_timeout_seconds=30.0,
    request_timeout_seconds=5400.0,
    sheds=True,
    ttft_percentile=95,
    itl_percentile=90,
    window_seconds=600.0,
)


def test_a_tier_says_all_that_it_says() -> None:
    spec = full_manifest("PriorityTier")["spec"]
    assert tier_rule(a_tier("batch", **spec)) == TierRule(
        name="batch",
        value=-5,
        reserved_share_percent=20,
        preempts_lower=False,
        wait_window_seconds=0.25,
    )
    assert tier_rule(a_tier("plain")) == TierRule(name="plain", value=0)


def test_preemption_and_service_level_say_all_that_they_say() -> None:
    full = PreemptionPolicySpec.model_validate(full_manifest("PreemptionPolicy")["spec"])
    assert preemption_rule(full) == PREEMPTION
    assert service_rule(ServiceLevelSpec.model_validate(full_manifest("ServiceLevel")["spec"])) == (
        SERVICE
    )


def test_empty_preemption_and_service_level_are_the_defaults() -> None:
    assert preemption_rule(PreemptionPolicySpec()) == PreemptionRule()
    assert service_rule(ServiceLevelSpec()) == ServiceRule()


def test_a_tenant_says_all_that_it_says() -> None:
    spec = full_manifest("TenantPolicy")["spec"]
    del spec["poolRefs"]
    rule = tenant_rule(
        a_tenant_policy("acme", "team", **spec),
        tier="gold",
        allowed_tiers=["bronze"],
        preemption=PREEMPTION,
        service=SERVICE,
        key_digests=["ab" * 32],
        has_quota=True,
    )
    assert rule == TenantRule(
        tenant="acme-chat",
        policy="team/acme",
        tier="gold",
        allowed_tiers=("bronze",),
        weight=300,
        kv_nominal_percent=30,
        kv_borrowing_limit_percent=20,
        kv_lendable_percent=50,
        max_running=16,
        max_queued=100,
        max_queued_tokens=50_000,
        max_prompt_tokens=8192,
        max_output_tokens=1024,
        rate=RateRule(requests_per_minute=600, tokens_per_minute=100_000, burst_percent=150),
        cancel_on_disconnect=False,
        shares_prefixes=True,
        preemption=PREEMPTION,
        service=SERVICE,
        stop=StopPolicy.HOLD,
        key_digests=("ab" * 32,),
    )


def test_a_tenant_that_says_nothing_has_the_defaults() -> None:
    rule = tenant_rule(
        a_tenant_policy("acme", "team"),
        tier="gold",
        allowed_tiers=[],
        preemption=PreemptionRule(),
        service=ServiceRule(),
        key_digests=[],
        has_quota=True,
    )
    assert rule == TenantRule(tenant="team/acme", policy="team/acme", tier="gold")


def test_a_pool_says_all_that_it_says() -> None:
    pool = an_engine_pool(**full_manifest("EnginePool")["spec"])
    assert batching_rule(pool) == BatchingRule(
        max_num_seqs=64,
        max_batched_tokens=2048,
        wait_window_seconds=0.005,
        prefill_chunk_min=64,
        prefill_chunk_max=512,
        max_partial_prefills=2,
    )
    assert kv_estimate(pool) is KvEstimate.WORST_CASE
    assert unknown_tenants_rule(pool, "bronze") == UnknownTenantsRule(
        action=UnknownAction.ADMIT, tier="bronze", weight=1, max_running=2
    )
    assert list(pool_flaws(pool)) == []


@pytest.mark.parametrize(
    "batching",
    [
        {"prefillChunk": {"min": 9, "max": 8}},
        {"prefillChunk": {"min": 9}, "maxBatchedTokens": 8},
        {"prefillChunk": {"min": 1, "max": 9}, "maxBatchedTokens": 8},
    ],
)
def test_a_stored_prefill_chunk_that_contradicts_itself_is_left_to_the_engine(
    batching: dict[str, object],
) -> None:
    pool: EnginePool = an_engine_pool(batching={"maxNumSeqs": 7, **batching})
    rule = batching_rule(pool)
    assert (rule.prefill_chunk_min, rule.prefill_chunk_max) == (None, None)
    assert rule.max_num_seqs == 7
    assert rule.max_batched_tokens == batching.get("maxBatchedTokens")
    (flaw,) = pool_flaws(pool)
    assert (flaw.reason, "spec.batching.prefillChunk" in flaw.message) == ("Invalid", True)


@pytest.mark.parametrize("chunk", [{}, {"min": 8}, {"max": 8}, {"min": 8, "max": 8}])
def test_a_prefill_chunk_may_fill_the_step(chunk: dict[str, int]) -> None:
    pool = an_engine_pool(batching={"prefillChunk": chunk, "maxBatchedTokens": 8})
    rule = batching_rule(pool)
    assert (rule.prefill_chunk_min, rule.prefill_chunk_max) == (chunk.get("min"), chunk.get("max"))
    assert list(pool_flaws(pool)) == []
