"""Random requests, and policies that change trait by trait."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hypothesis import strategies as st

from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_policies.rules import (
    UNKNOWN_TENANT,
    BatchingRule,
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    StopPolicy,
    TenantRule,
    TierRule,
    UnknownAction,
    UnknownTenantsRule,
    WatermarkRule,
)
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant

Trait = tuple[str, str]
"""Whose trait it is (a tenant, a tier, or the pool), and its name."""

Traits = Mapping[str, Mapping[str, object]]

TENANTS = ("a", "b", "c", "d")
TIERS = {"high": 10, "standard": 0, "low": -10}
POOL = "pool"
_MUCH_PERCENT = {"a": 40, "b": 10, "c": 5, "d": 5}  # together no more than any low watermark
STOP_TOKENS = tuple(range(40))

_KV_TRAITS: Traits = {
    "high": {"tier": "high"},
    "standard": {"tier": "standard"},
    "low": {"tier": "low"},
    "weight 5": {"weight": 5},
    "owns 5": {"kv_nominal_percent": 5},
    "owns much": {"kv_nominal_percent": 40},
    "lends half": {"kv_lendable_percent": 50},
    "swaps": {"mode": PreemptionMode.SWAP},
    "recomputes": {"mode": PreemptionMode.RECOMPUTE},
    "preempted once": {"max_preemptions": 1},
    "preempted often": {"max_preemptions": 10},
    "quantum 4": {"min_quantum_tokens": 4},
    "shares prefixes": {"shares_prefixes": True},
    "goes low": {"allowed_tiers": ("low",)},
    "goes anywhere": {"allowed_tiers": ("standard", "low")},
}
_OTHER_TRAITS: Traits = {
    "weight 0": {"weight": 0},
    "lends nothing": {"kv_lendable_percent": 0},
    "borrows nothing": {"kv_borrowing_limit_percent": 0},
    "borrows 40": {"kv_borrowing_limit_percent": 40},
    "one running": {"max_running": 1},
    "three running": {"max_running": 3},
    "one queued": {"max_queued": 1},
    "three queued": {"max_queued": 3},
    "30 tokens queued": {"max_queued_tokens": 30},
    "prompts of 20": {"max_prompt_tokens": 20},
    "outputs of 10": {"max_output_tokens": 10},
    "not preemptible": {"preemptible": False},
    "reclaims nothing": {"reclaims": False},
    "first token in 0.1 s": {"ttft_seconds": 0.1},
    "refused rather than late": {"ttft_seconds": 0.2, "sheds": True},
    "next token in 60 ms": {"itl_seconds": 0.06},
    "queued for 0.3 s": {"queue_timeout_seconds": 0.3},
    "done in 1 s": {"request_timeout_seconds": 1.0},
    "held": {"stop": StopPolicy.HOLD},
    "drained": {"stop": StopPolicy.DRAIN},
    "cancelled": {"stop": StopPolicy.CANCEL},
    "absent": {},
}
TENANT_TRAITS: Traits = {**_KV_TRAITS, **_OTHER_TRAITS}
TIER_TRAITS: Traits = {
    "reserves 10": {"reserved_share_percent": 10},
    "reserves 30": {"reserved_share_percent": 30},
    "displaces nobody": {"preempts_lower": False},
    "waits 30 ms": {"wait_window_seconds": 0.03},
    "waits 0.5 s": {"wait_window_seconds": 0.5},
}
POOL_TRAITS: Traits = {
    "worst case": {"kv_estimate": KvEstimate.WORST_CASE},
    "predicted": {"kv_estimate": KvEstimate.PREDICTED},
    "unknown": {"action": UnknownAction.ADMIT},
    "one unknown": {"action": UnknownAction.ADMIT, "max_running": 1},
    "early": {"low_percent": 60, "high_percent": 90},
    "usual": {"low_percent": 80, "high_percent": 92},
    "one place": {"max_num_seqs": 1},
    "three places": {"max_num_seqs": 3},
    "one token": {"max_batched_tokens": 1, "prefill_chunk_min": 1},
    "five tokens": {"max_batched_tokens": 5, "prefill_chunk_min": 1},
    "chunks of 3": {"prefill_chunk_max": 3, "prefill_chunk_min": 1},
    "one prompt": {"max_partial_prefills": 1},
    "waits 50 ms": {"wait_window_seconds": 0.05},
}

KV_ALONE: list[Trait] = [
    *[(tenant, trait) for tenant in TENANTS for trait in _KV_TRAITS],
    *[(POOL, trait) for trait in ("worst case", "predicted", "predicted", "usual")],
]
"""Traits under which KV alone decides: nobody is stopped, limited or timed out."""

ANY: list[Trait] = [
    *[(tenant, trait) for tenant in TENANTS for trait in TENANT_TRAITS],
    *[(tier, trait) for tier in TIERS for trait in TIER_TRAITS],
    *[(POOL, trait) for trait in POOL_TRAITS],
]

FIRST: list[Trait] = [("a", "owns much"), ("b", "low"), ("c", "high")]


@dataclass
class PolicyDraft:
    """A policy that changes trait by trait; at first memory runs short as often as can be."""

    traits: dict[Trait, None] = field(default_factory=lambda: dict.fromkeys(FIRST))

    def toggle(self, changes: Iterable[Trait]) -> PolicySnapshot:
        """Give traits, or take them away again, and return the policy as it is then."""
        for trait in changes:
            if trait in self.traits:
                del self.traits[trait]
            else:
                self.traits[trait] = None
        pool = self._of(POOL, POOL_TRAITS)
        if "prefill_chunk_max" in pool:
            pool["prefill_chunk_max"] = min(3, pool.get("max_batched_tokens", 3))
        present = [name for name in TENANTS if (name, "absent") not in self.traits]
        return a_snapshot(
            *[self._tenant(name) for name in present or TENANTS[:1]],
            tiers={
                name: TierRule(name=name, value=value, **self._of(name, TIER_TRAITS))
                for name, value in TIERS.items()
            },
            unknown_tenants=UnknownTenantsRule(tier="low", **_only(UnknownTenantsRule, pool)),
            watermarks=WatermarkRule(
                **{"low_percent": 95, "high_percent": 99, **_only(WatermarkRule, pool)}
            ),
            batching=BatchingRule(**_only(BatchingRule, pool)),
            kv_estimate=pool.get("kv_estimate", KvEstimate.OPTIMISTIC),
        )

    def _tenant(self, name: str) -> TenantRule:
        given = self._of(name, TENANT_TRAITS)
        if "kv_nominal_percent" in given:
            given["kv_nominal_percent"] = min(given["kv_nominal_percent"], _MUCH_PERCENT[name])
        own = TIERS[given.get("tier", "standard")]
        allowed = tuple(t for t in given.get("allowed_tiers", ()) if TIERS[t] < own)
        return a_tenant(
            name,
            preemption=PreemptionRule(**{"min_quantum_tokens": 0, **_only(PreemptionRule, given)}),
            service=ServiceRule(**_only(ServiceRule, given)),
            **{"weight": 1, **_only(TenantRule, given), "allowed_tiers": allowed},
        )

    def _of(self, subject: str, named: Traits) -> dict[str, Any]:
        given: dict[str, Any] = {}
        for whose, trait in self.traits:
            if whose == subject:
                given |= named[trait]
        return given


def _only(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given of the fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in given.items() if name in names}


def a_drawn_request(
    *,
    tenant: str,
    family: int,
    length: int,
    tail: tuple[int, ...],
    output: int,
    stops: bool,
    ttft: float | None,
    tier: str | None = None,
) -> Request:
    """Build a request, without an id; its prompt begins as all of its family do."""
    return Request(
        request_id="",
        tenant=tenant,
        prompt_ids=tuple(100 * family + position for position in range(length)) + tail,
        max_output_tokens=output,
        sampling=SamplingParams(seed=len(tail)),
        stop_token_ids=STOP_TOKENS if stops else (),
        ttft_seconds=ttft,
        tier=tier,
    )


def requests() -> st.SearchStrategy[Request]:
    """Draw requests of all tenants, and of nobody known."""
    return st.builds(
        a_drawn_request,
        tenant=st.sampled_from((*TENANTS, *TENANTS, UNKNOWN_TENANT)),
        family=st.integers(0, 2),
        # Multiples of the block size often, so that whole contexts are found in the prefix cache.
        length=st.sampled_from([4, 8, 1, 2, 12, 13, 16, 21, 24, 30, 36, 44, 60]),
        tail=st.sampled_from([(), (7,), (8, 9), (5, 5, 5)]),
        output=st.sampled_from([1, 2, 5, 12, 20, 40]),
        stops=st.booleans(),
        ttft=st.sampled_from([None, None, 0.05, 1.0]),
        tier=st.sampled_from([None, None, None, "low", "standard"]),
    )
