import hashlib
from collections.abc import Mapping

import pytest

from tidegate_operator import compiler
from tidegate_operator.cluster import ClusterView
from tidegate_operator.compiler import CompiledPool, compile_pool, tier_flaws
from tidegate_operator.references import policy_references
from tidegate_operator.resources import Resource, TenantPolicy, Watermarks
from tidegate_policies.rules import StopPolicy, TierRule, UnknownTenantsRule, WatermarkRule
from tidegate_testing.objects import (
    a_tenant_policy,
    a_tier,
    a_view,
    an_engine_pool,
)

KEY = hashlib.sha256(b"key").hexdigest()
OTHER_KEY = hashlib.sha256(b"other").hexdigest()
KEY_REF = [{"name": "keys", "key": "first"}]


def compile_of(
    *objects: Resource,
    secrets: Mapping[str, Mapping[str, str | None]] | None = None,
    namespaces: Mapping[str, Mapping[str, str]] | None = None,
) -> CompiledPool:
    view = a_view(*objects, secrets=secrets, namespaces=namespaces)
    (pool,) = view.pools.values()
    return compile_pool(view, pool)


def reasons(compiled: CompiledPool) -> dict[str, list[str]]:
    return {
        name: [str(flaw.reason) for flaw in verdict.flaws]
        for name, verdict in compiled.verdicts.items()
    }


def tenants(compiled: CompiledPool) -> list[str]:
    return [rule.tenant for rule in compiled.snapshot.tenants]


def test_every_enforced_field_reaches_the_snapshot() -> None:
    pool = an_engine_pool(
        batching={"maxNumSeqs": 8, "maxBatchedTokens": 256},
        kv={"watermarks": {"lowPercent": 60, "highPercent": 70}},
        unknownTenants={"action": "Admit", "priorityTier": "batch", "weight": 2, "maxRunning": 3},
    )
    policy = a_tenant_policy(
        tenant="ACME",
        priorityTier="gold",
        weight=300,
        kv={"nominalPercent": 25},
        limits={"maxPromptTokens": 10, "maxOutputTokens": 20},
        cancelOnDisconnect=False,
        apiKeySecretRefs=KEY_REF,
    )
    compiled = compile_of(
        pool,
        policy,
        a_tier("gold", 100),
        a_tier("batch", -1),
        secrets={"team/keys": {"first": KEY}},
    )
    snapshot = compiled.snapshot
    (rule,) = snapshot.tenants
    assert (rule.tenant, rule.policy, rule.tier) == ("ACME", "team/acme", "gold")
    assert (rule.weight, rule.kv_nominal_percent) == (300, 25)
    assert (rule.max_prompt_tokens, rule.max_output_tokens) == (10, 20)
    assert rule.cancel_on_disconnect is False
    assert rule.key_digests == (KEY,)
    assert (snapshot.batching.max_num_seqs, snapshot.batching.max_batched_tokens) == (8, 256)
    assert snapshot.watermarks == WatermarkRule(low_percent=60, high_percent=70)
    assert snapshot.unknown_tenants.tier == "batch"
    assert snapshot.unknown_tenants.max_running == 3
    assert snapshot.tier_values == {"gold": 100, "batch": -1}


def test_tenant_is_named_after_namespace_and_policy() -> None:
    assert tenants(compile_of(an_engine_pool(), a_tenant_policy("acme", "team"))) == ["team/acme"]


def test_no_namespace_can_take_a_name_of_anothers_tenant() -> None:
    there = [{"name": "chat", "namespace": "team"}]
    squatter = a_tenant_policy("squatter", "away", age=9, tenant="team/acme", poolRefs=there)
    owner = a_tenant_policy("acme", "team", age=1)
    plain = a_tenant_policy("plain", "away", tenant="acme", poolRefs=there)
    own = a_tenant_policy("own", "away", tenant="away/acme/chat", poolRefs=there)
    pool = an_engine_pool(allowedNamespaces={"from": "All"})
    compiled = compile_of(pool, squatter, owner, plain, own)
    assert reasons(compiled) == {
        "away/squatter": ["Invalid"],
        "team/acme": [],
        "away/plain": [],
        "away/own": [],
    }
    assert compiled.snapshot.tenant_rules["team/acme"].policy == "team/acme"


def test_unused_tiers_and_rules_of_a_refusal_make_no_new_digest() -> None:
    policy = a_tenant_policy()
    plain = compile_of(an_engine_pool(), policy).snapshot
    other = compile_of(
        an_engine_pool(unknownTenants={"action": "Reject", "weight": 7}), policy, a_tier("spare", 9)
    ).snapshot
    assert plain.digest == other.digest
    assert plain.unknown_tenants == UnknownTenantsRule()


def test_older_policy_keeps_the_tenant_and_ties_go_by_name() -> None:
    old = a_tenant_policy("z", age=2, tenant="t", weight=1)
    new = a_tenant_policy("a", age=1, tenant="t", weight=2)
    twin = a_tenant_policy("zz", age=2, tenant="t", weight=3)
    compiled = compile_of(an_engine_pool(), new, twin, old)
    assert reasons(compiled) == {
        "team/z": [],
        "team/zz": ["TenantConflict"],
        "team/a": ["TenantConflict"],
    }
    assert compiled.snapshot.tenant_rules["t"].weight == 1


def test_a_key_of_two_policies_maps_to_neither() -> None:
    one = a_tenant_policy("one", apiKeySecretRefs=KEY_REF)
    two = a_tenant_policy("two", apiKeySecretRefs=[*KEY_REF, {"name": "keys", "key": "second"}])
    secrets = {"team/keys": {"first": KEY, "second": OTHER_KEY}}
    compiled = compile_of(an_engine_pool(), one, two, secrets=secrets)
    assert reasons(compiled) == {"team/one": ["KeyConflict"], "team/two": ["KeyConflict"]}
    assert dict(compiled.snapshot.tenant_by_key_digest) == {OTHER_KEY: "team/two"}
    assert tenants(compiled) == ["team/one", "team/two"]


def test_a_key_twice_in_one_policy_is_no_conflict() -> None:
    refs = [{"name": "keys", "key": "first"}, {"name": "keys", "key": "again"}]
    secrets = {"team/keys": {"first": KEY, "again": KEY}}
    compiled = compile_of(an_engine_pool(), a_tenant_policy(apiKeySecretRefs=refs), secrets=secrets)
    assert dict(compiled.snapshot.tenant_by_key_digest) == {KEY: "team/acme"}


def test_a_policy_out_of_force_takes_no_key_away() -> None:
    good = a_tenant_policy("good", age=1, apiKeySecretRefs=KEY_REF)
    loser = a_tenant_policy("loser", tenant="team/good", apiKeySecretRefs=KEY_REF)
    compiled = compile_of(an_engine_pool(), good, loser, secrets={"team/keys": {"first": KEY}})
    assert reasons(compiled) == {"team/good": [], "team/loser": ["TenantConflict"]}
    assert dict(compiled.snapshot.tenant_by_key_digest) == {KEY: "team/good"}


@pytest.mark.parametrize(
    ("secrets", "reason"),
    [
        ({}, "SecretNotFound"),
        ({"team/keys": {"second": KEY}}, "SecretKeyNotFound"),
        ({"team/keys": {"first": None}}, "SecretKeyNotFound"),
        ({"other/keys": {"first": KEY}}, "SecretNotFound"),
    ],
)
def test_missing_key_is_revoked_and_the_rest_stays(
    secrets: dict[str, dict[str, str | None]], reason: str
) -> None:
    policy = a_tenant_policy(apiKeySecretRefs=KEY_REF)
    view = a_view(an_engine_pool(), policy, secrets=secrets)
    assert reasons_of_references(view, policy) == [reason]
    compiled = compile_pool(view, view.pools["team/chat"])
    assert compiled.snapshot.tenants[0].key_digests == ()


def reasons_of_references(view: ClusterView, policy: TenantPolicy) -> list[str]:
    return [str(flaw.reason) for flaw in policy_references(view, policy).missing]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"priorityTier": "gone"}, "TierNotFound"),
        ({"allowedTiers": ["gone"]}, "TierNotFound"),
        ({"preemptionPolicyRef": {"name": "gone"}}, "PreemptionPolicyNotFound"),
        ({"serviceLevelRef": {"name": "gone"}}, "ServiceLevelNotFound"),
        ({"pools": ["chat", "gone"]}, "PoolNotFound"),
    ],
)
def test_missing_reference_is_named_and_the_policy_stays_in_force(
    spec: dict[str, object], reason: str
) -> None:
    policy = a_tenant_policy(weight=7, **spec)  # type: ignore[arg-type]
    view = a_view(an_engine_pool(), policy)
    assert reasons_of_references(view, policy) == [reason]
    compiled = compile_pool(view, view.pools["team/chat"])
    assert compiled.snapshot.tenant_rules["team/acme"].weight == 7


TIERS = (a_tier("gold", 10), a_tier("silver", 5), a_tier("bronze", 0, reservedSharePercent=20))


def test_allowed_tiers_come_into_the_snapshot_though_nobody_is_in_them() -> None:
    policy = a_tenant_policy(priorityTier="gold", allowedTiers=["silver", "bronze"])
    compiled = compile_of(an_engine_pool(), policy, *TIERS)
    assert compiled.snapshot.tenants[0].allowed_tiers == ("bronze", "silver")
    assert [tier.name for tier in compiled.snapshot.tiers] == ["gold", "silver", "bronze"]
    assert compiled.snapshot.tiers[2].reserved_share_percent == 20
    assert compiled.verdicts["team/acme"].flaws == ()


def test_an_allowed_tier_that_is_gone_is_left_out_and_named() -> None:
    policy = a_tenant_policy(priorityTier="gold", allowedTiers=["gone", "bronze"])
    compiled = compile_of(an_engine_pool(), policy, *TIERS)
    assert compiled.snapshot.tenants[0].allowed_tiers == ("bronze",)
    [missing] = compiled.verdicts["team/acme"].missing
    assert (missing.reason, "'gone'" in missing.message) == ("TierNotFound", True)
    assert "default tier" not in missing.message


@pytest.mark.parametrize("own", ["silver", None])
def test_an_allowed_tier_that_is_not_lower_is_left_out_and_the_rest_in_force(
    own: str | None,
) -> None:
    policy = a_tenant_policy(weight=7, allowedTiers=["gold", "bronze"], priorityTier=own)
    default = a_tier("standard", 5, globalDefault=True)
    compiled = compile_of(an_engine_pool(), policy, default, *TIERS)
    verdict = compiled.verdicts["team/acme"]
    assert verdict.is_in_force
    [flaw] = verdict.flaws
    assert (flaw.reason, flaw.is_partial) == ("Invalid", True)
    assert "spec.allowedTiers" in flaw.message
    assert "'gold' of value 10" in flaw.message
    rule = compiled.snapshot.tenants[0]
    assert (rule.weight, rule.allowed_tiers) == (7, ("bronze",))
    assert "gold" not in compiled.snapshot.tier_values


def test_a_tier_that_rises_stops_being_allowed() -> None:
    policy = a_tenant_policy(priorityTier="silver", allowedTiers=["bronze"])
    for value, allowed in ((4, ("bronze",)), (5, ()), (6, ())):
        compiled = compile_of(an_engine_pool(), policy, TIERS[1], a_tier("bronze", value))
        assert compiled.snapshot.tenants[0].allowed_tiers == allowed


def test_a_tier_that_doesnt_take_a_namespace_is_not_to_be_asked_for_either() -> None:
    closed = a_tier(
        "bronze",
        0,
        allowedNamespaces={"from": "Selector", "selector": {"matchLabels": {"env": "prod"}}},
    )
    policy = a_tenant_policy(priorityTier="gold", allowedTiers=["bronze"])
    compiled = compile_of(an_engine_pool(), policy, TIERS[0], closed)
    [flaw] = compiled.verdicts["team/acme"].flaws
    assert flaw.reason == "NamespaceNotAllowed"
    assert not compiled.verdicts["team/acme"].is_in_force
    assert compiled.snapshot.tiers == ()


def test_missing_tier_falls_back_to_the_global_default() -> None:
    default = a_tier("standard", 5, globalDefault=True)
    for policy in (a_tenant_policy(), a_tenant_policy(priorityTier="gone")):
        compiled = compile_of(an_engine_pool(), policy, default)
        assert compiled.snapshot.tenants[0].tier == "standard"


def test_without_a_default_the_implicit_tier_has_value_zero_and_an_impossible_name() -> None:
    snapshot = compile_of(an_engine_pool(), a_tenant_policy()).snapshot
    assert snapshot.tiers == (TierRule(name="_default", value=0),)


def test_oldest_default_tier_wins_and_the_other_is_told() -> None:
    old = a_tier("old", 1, age=2, globalDefault=True)
    new = a_tier("new", 2, age=1, globalDefault=True)
    view = a_view(an_engine_pool(), a_tenant_policy(), new, old, a_tier("plain"))
    assert compile_pool(view, view.pools["team/chat"]).snapshot.tenants[0].tier == "old"
    assert tier_flaws(view, "old") == tier_flaws(view, "plain") == ()
    (flaw,) = tier_flaws(view, "new")
    assert (flaw.reason, "'old'" in flaw.message) == ("TierConflict", True)


def test_newest_nominal_that_does_not_fit_becomes_zero_and_others_stay() -> None:
    policies = [
        a_tenant_policy("first", age=3, kv={"nominalPercent": 50}),
        a_tenant_policy("second", age=2, kv={"nominalPercent": 31}),
        a_tenant_policy("third", age=1, kv={"nominalPercent": 30}),
    ]
    compiled = compile_of(an_engine_pool(), *reversed(policies))
    nominal = {rule.policy: rule.kv_nominal_percent for rule in compiled.snapshot.tenants}
    assert nominal == {"team/first": 50, "team/second": 0, "team/third": 30}
    assert reasons(compiled)["team/second"] == ["QuotaOversubscribed"]
    assert reasons(compiled)["team/third"] == []


@pytest.mark.parametrize("stop", ["Hold", "Drain", "Cancel"])
def test_stopped_tenant_keeps_its_keys_and_never_becomes_an_unknown_one(stop: str) -> None:
    policy = a_tenant_policy(apiKeySecretRefs=KEY_REF, stopPolicy=stop)
    pool = an_engine_pool(unknownTenants={"action": "Admit"})
    compiled = compile_of(pool, policy, secrets={"team/keys": {"first": KEY}})
    (rule,) = compiled.snapshot.tenants
    assert (rule.stop, rule.key_digests) == (StopPolicy(stop), (KEY,))


@pytest.mark.parametrize(
    ("allowed", "labels", "is_allowed"),
    [
        ({"from": "Same"}, {}, False),
        ({"from": "All"}, {}, True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "b"}}}, {"a": "b"}, True),
        ({"from": "Selector", "selector": {"matchLabels": {"a": "b"}}}, {"a": "c"}, False),
    ],
)
def test_pool_admits_the_namespaces_that_it_allows(
    allowed: dict[str, object], labels: dict[str, str], *, is_allowed: bool
) -> None:
    pool = an_engine_pool(allowedNamespaces=allowed)
    guest = a_tenant_policy("guest", "other", pools=["team/chat"])
    own = a_tenant_policy("own", "team") if allowed["from"] == "Same" else None
    objects = (pool, guest, own) if own else (pool, guest)
    compiled = compile_of(*objects, namespaces={"other": labels})
    expected = [] if is_allowed else ["NamespaceNotAllowed"]
    assert reasons(compiled)["other/guest"] == expected
    assert ("other/guest" in tenants(compiled)) is is_allowed
    assert own is None or "team/own" in tenants(compiled)


def test_tier_that_does_not_allow_the_namespace_takes_the_policy_out_of_force() -> None:
    selector = {"from": "Selector", "selector": {"matchLabels": {"paid": "yes"}}}
    tier = a_tier("gold", 9, allowedNamespaces=selector)
    policy = a_tenant_policy(priorityTier="gold")
    assert tenants(compile_of(an_engine_pool(), policy, tier)) == []
    namespaces = {"team": {"paid": "yes"}}
    paid = compile_of(an_engine_pool(), policy, tier, namespaces=namespaces)
    assert tenants(paid) == ["team/acme"]


def test_reserved_tenant_name_is_invalid() -> None:
    compiled = compile_of(an_engine_pool(), a_tenant_policy(tenant="unknown"))
    assert reasons(compiled) == {"team/acme": ["Invalid"]}
    assert tenants(compiled) == []


def test_newest_beyond_the_limit_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_TENANTS", 2)
    policies = [a_tenant_policy(f"t{age}", age=age) for age in range(4)]
    compiled = compile_of(an_engine_pool(), *policies)
    assert tenants(compiled) == ["team/t2", "team/t3"]
    assert reasons(compiled)["team/t0"] == ["TooManyTenants"]


def test_stored_watermarks_that_contradict_each_other_become_the_defaults() -> None:
    pool = an_engine_pool()
    marks = Watermarks(low_percent=90, high_percent=50)
    bad = pool.model_copy(
        update={
            "spec": pool.spec.model_copy(
                update={"kv": pool.spec.kv.model_copy(update={"watermarks": marks})}
            )
        }
    )
    compiled = compile_of(bad, a_tenant_policy())
    assert compiled.snapshot.watermarks == WatermarkRule()
    assert [str(flaw.reason) for flaw in compiled.flaws] == ["Invalid"]


def test_unknown_tenants_fall_to_the_default_tier_where_theirs_is_missing() -> None:
    pool = an_engine_pool(unknownTenants={"action": "Admit", "priorityTier": "gone"})
    compiled = compile_of(pool)
    assert compiled.snapshot.unknown_tenants.tier == "_default"
    assert [str(flaw.reason) for flaw in compiled.missing] == ["TierNotFound"]
