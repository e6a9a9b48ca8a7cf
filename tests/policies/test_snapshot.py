import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_policies.problems import SnapshotError
from tidegate_policies.rules import (
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
from tidegate_testing.policies import POOL, a_snapshot, a_tenant

seconds = st.floats(0.001, 86_400) | st.integers(1, 86_400).map(float)
percents = st.integers(0, 100)
counts = st.none() | st.integers(1, 10_000)
tenant_names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name != "unknown"
)
tenants = st.lists(
    st.builds(
        TenantRule,
        tenant=tenant_names,
        policy=st.just("teams/acme"),
        tier=st.sampled_from(["high", "low"]),
        weight=st.integers(0, 1_000_000),
        kv_nominal_percent=st.integers(0, 16),
        kv_borrowing_limit_percent=st.none() | percents,
        kv_lendable_percent=percents,
        max_running=counts,
        max_queued=counts,
        max_queued_tokens=counts,
        cancel_on_disconnect=st.booleans(),
        preemption=st.builds(
            PreemptionRule,
            preemptible=st.booleans(),
            mode=st.sampled_from(PreemptionMode),
            max_preemptions=st.integers(1, 100),
            min_quantum_tokens=st.integers(0, 100),
            reclaims=st.booleans(),
        ),
        service=st.builds(
            ServiceRule, ttft_seconds=st.none() | seconds, queue_timeout_seconds=st.none() | seconds
        ),
        stop=st.sampled_from(StopPolicy),
    ),
    max_size=5,
    unique_by=lambda rule: rule.tenant,
)
tiers = st.builds(
    lambda high, low, window, *, preempts: [
        TierRule(name="high", value=9, reserved_share_percent=high, preempts_lower=preempts),
        TierRule(name="low", value=-9, reserved_share_percent=low, wait_window_seconds=window),
    ],
    st.integers(0, 45),
    st.integers(0, 45),
    st.none() | st.just(0.0) | seconds,
    preempts=st.booleans(),
)
snapshots = st.builds(
    PolicySnapshot.of,
    st.just(POOL),
    tiers=tiers,
    tenants=tenants,
    batching=st.builds(
        BatchingRule,
        max_num_seqs=counts,
        wait_window_seconds=st.none() | st.just(0.0) | seconds,
        prefill_chunk_min=st.none() | st.integers(1, 10),
        prefill_chunk_max=st.none() | st.integers(10, 100),
        max_batched_tokens=st.none() | st.integers(100, 1000),
    ),
    kv_estimate=st.sampled_from(KvEstimate),
)


@given(snapshots)
def test_a_snapshot_survives_its_text_and_has_only_one(snapshot: PolicySnapshot) -> None:
    text = snapshot.to_text()
    again = PolicySnapshot.from_text(text)
    assert again == snapshot
    assert (again.to_text(), again.digest) == (text, snapshot.digest)


@given(snapshots)
def test_a_text_that_spells_out_the_defaults_has_the_same_digest(snapshot: PolicySnapshot) -> None:
    pool = asdict(snapshot)
    everything = "\n".join(json.dumps(part) for part in (pool, *pool.pop("tenants")))
    assert PolicySnapshot.from_text(everything).digest == snapshot.digest


def test_the_text_of_a_tenant_holds_only_what_it_chose() -> None:
    chosen = a_tenant(max_running=2, preemption=PreemptionRule(mode=PreemptionMode.SWAP))
    _, line = a_snapshot(chosen).to_text().split("\n")
    assert json.loads(line) == {
        "tenant": "acme",
        "policy": "teams/acme",
        "tier": "standard",
        "max_running": 2,
        "preemption": {"mode": "Swap"},
    }


def test_a_thousand_tenants_are_a_short_text() -> None:
    snapshot = a_snapshot(*(a_tenant(f"team-{n}") for n in range(1000)))
    assert len(snapshot.to_text()) < 100_000


def test_the_defaults_are_part_of_the_format() -> None:
    """With other ones, the texts that are already signed and stored would say something else."""
    snapshot = PolicySnapshot.of("p", tiers=[TierRule(name="t", value=0)])
    rule = TenantRule(tenant="a", policy="b", tier="t")
    assert asdict(snapshot) == {
        "pool": "p",
        "batching": {
            "max_num_seqs": None,
            "max_batched_tokens": None,
            "wait_window_seconds": None,
            "prefill_chunk_min": None,
            "prefill_chunk_max": None,
            "max_partial_prefills": None,
        },
        "watermarks": {"low_percent": 80, "high_percent": 92},
        "kv_estimate": "Predicted",
        "unknown_tenants": {"action": "Reject", "tier": "", "weight": 1, "max_running": None},
        "tiers": (
            {
                "name": "t",
                "value": 0,
                "reserved_share_percent": 0,
                "preempts_lower": True,
                "wait_window_seconds": None,
            },
        ),
        "tenants": (),
        "drain": {"engines": (), "seconds": None},
    }
    assert asdict(rule) == {
        "tenant": "a",
        "policy": "b",
        "tier": "t",
        "allowed_tiers": (),
        "weight": 100,
        "kv_nominal_percent": 0,
        "kv_borrowing_limit_percent": None,
        "kv_lendable_percent": 100,
        "max_running": None,
        "max_queued": None,
        "max_queued_tokens": None,
        "max_prompt_tokens": None,
        "max_output_tokens": None,
        "rate": {"requests_per_minute": None, "tokens_per_minute": None, "burst_percent": 100},
        "cancel_on_disconnect": True,
        "shares_prefixes": False,
        "preemption": {
            "preemptible": True,
            "mode": "Auto",
            "max_preemptions": 3,
            "min_quantum_tokens": 16,
            "reclaims": True,
        },
        "service": {
            "ttft_seconds": None,
            "itl_seconds": None,
            "queue_timeout_seconds": None,
            "request_timeout_seconds": None,
            "sheds": False,
            "ttft_percentile": 99,
            "itl_percentile": 99,
            "window_seconds": 300.0,
        },
        "stop": "None",
        "key_digests": (),
    }


@pytest.mark.parametrize(
    ("allowed", "problem"),
    [("none", "tier 'none' is not in the snapshot"), ("mid", "allowed tier 'mid' is not below")],
)
def test_an_allowed_tier_is_one_below_the_tenants_own(allowed: str, problem: str) -> None:
    tiers = {"mid": 5, "low": 1}
    a_snapshot(a_tenant("a", tier="mid", allowed_tiers=("low",)), tiers=tiers)
    with pytest.raises(SnapshotError, match=problem):
        a_snapshot(a_tenant("a", tier="mid", allowed_tiers=("low", allowed)), tiers=tiers)


@given(st.permutations(["a", "b", "c"]), st.permutations(["high", "low", "mid"]))
def test_the_digest_depends_on_content_alone(tenants: list[str], tiers: list[str]) -> None:
    values = {"high": 10, "mid": 5, "low": 5}
    snapshot = PolicySnapshot.of(
        POOL,
        tiers=[TierRule(name=t, value=values[t]) for t in tiers],
        tenants=[a_tenant(t, tier="mid") for t in tenants],
    )
    assert [t.name for t in snapshot.tiers] == ["high", "low", "mid"]
    assert snapshot.digest == a_snapshot(*map(_mid, "abc"), tiers=values).digest


def _mid(name: str) -> TenantRule:
    return a_tenant(name, tier="mid")


def test_any_change_changes_the_digest() -> None:
    one = a_snapshot(a_tenant(weight=1))
    assert one.digest != a_snapshot(a_tenant(weight=2)).digest


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{}", "pool"),
        ("nonsense", "JSON"),
        (a_snapshot(a_tenant(weight=7)).to_text().replace("7", "-7"), "tenants.0.weight"),
        (a_snapshot(a_tenant(weight=7)).to_text().replace("7", "1000001"), "1000000"),
        (
            a_snapshot(watermarks=WatermarkRule(low_percent=70)).to_text().replace("70", "95"),
            "low 95",
        ),
        (a_snapshot().to_text().replace("standard", "gone", 1), "not in the snapshot"),
        (a_snapshot().to_text().replace('"policy"', '"burst":1,"policy"', 1), "burst"),
        (a_snapshot().to_text()[:-1], "JSON"),
        (
            '{"pool":"p","tiers":[{"name":"t","value":0}],"tenants":[{"tenant":"a","policy":"p","tier":"t"}]}',
            "tenants: each has a line",
        ),
    ],
)
def test_a_bad_text_is_refused_by_the_name_of_its_field(text: str, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        PolicySnapshot.from_text(text)


def test_contradictions_are_refused() -> None:
    with pytest.raises(SnapshotError, match="'acme' appears twice"):
        a_snapshot(a_tenant(), a_tenant())
    with pytest.raises(SnapshotError, match="kept for undeclared tenants"):
        a_snapshot(a_tenant("unknown"))
    with pytest.raises(SnapshotError, match="sum up to 90"):
        a_snapshot(a_tenant("a", kv_nominal_percent=45), a_tenant("b", kv_nominal_percent=45))
    with pytest.raises(SnapshotError, match="key_digests"):
        a_snapshot(a_tenant("a", key_digests=("ab" * 32,)), a_tenant("b", key_digests=("ab" * 32,)))
    with pytest.raises(SnapshotError, match="unknown_tenants: tier 'none'"):
        a_snapshot(
            unknown_tenants=UnknownTenantsRule(action=UnknownAction.ADMIT, tier="none"),
        )
    with pytest.raises(SnapshotError, match="0 < low < high < 100"):
        a_snapshot(watermarks=WatermarkRule(low_percent=0, high_percent=10))
    with pytest.raises(SnapshotError, match="reserved shares sum up to 91"):
        PolicySnapshot.of(
            POOL,
            tiers=[
                TierRule(name="gold", value=1, reserved_share_percent=90),
                TierRule(name="free", value=0, reserved_share_percent=1),
            ],
        )


@pytest.mark.parametrize(
    ("batching", "named"),
    [
        (BatchingRule(prefill_chunk_min=9, prefill_chunk_max=8), "min is 9.*max of 8"),
        (BatchingRule(prefill_chunk_min=9, max_batched_tokens=8), "min is 9.*tokens of 8"),
        (BatchingRule(prefill_chunk_max=9, max_batched_tokens=8), "max is 9.*tokens of 8"),
    ],
)
def test_prefill_limits_that_nothing_meets_are_refused(batching: BatchingRule, named: str) -> None:
    with pytest.raises(SnapshotError, match=named):
        a_snapshot(batching=batching)


def test_a_key_leads_to_its_tenant() -> None:
    snapshot = a_snapshot(a_tenant("a", key_digests=("0a" * 32, "0b" * 32)))
    assert snapshot.tenant_by_key_digest == {"0a" * 32: "a", "0b" * 32: "a"}
