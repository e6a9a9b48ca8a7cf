"""Whatever objects there are: what a pool compiles to doesn't depend on how it came about."""

import hashlib
from collections.abc import Callable, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.compiler import CompiledPool, compile_pool
from tidegate_operator.resources import EnginePool, Resource, TenantPolicy
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.objects import (
    a_preemption_policy,
    a_tenant_policy,
    a_tier,
    a_view,
    an_engine_pool,
)

Secrets = Mapping[str, Mapping[str, str | None]]

KEY = hashlib.sha256(b"key").hexdigest()
OTHER_KEY = hashlib.sha256(b"other").hexdigest()

policies = st.builds(
    lambda name, namespace, age, spec: a_tenant_policy(
        name, namespace, age=age, pools=["team/chat"], **spec
    ),
    name=st.sampled_from(["a", "b", "c", "d", "ü"]),
    namespace=st.sampled_from(["team", "other"]),
    age=st.integers(0, 3),
    spec=st.fixed_dictionaries(
        {},
        optional={
            "tenant": st.sampled_from(["one", "two", "unknown", "名"]),
            "priorityTier": st.sampled_from(["gold", "gone", "closed"]),
            "allowedTiers": st.sampled_from([["standard"], ["closed", "gold"], ["gone"]]),
            "weight": st.integers(0, 1_000_000),
            "kv": st.builds(lambda n: {"nominalPercent": n}, st.integers(0, 100)),
            "preemptionPolicyRef": st.sampled_from([{"name": "gentle"}, {"name": "gone"}]),
            "serviceLevel": st.sampled_from([{}, {"itl": {"target": "1s100ms"}}]),
            "stopPolicy": st.sampled_from(["None", "Drain"]),
            "apiKeySecretRefs": st.lists(
                st.builds(
                    lambda name, key: {"name": name, "key": key},
                    st.sampled_from(["keys", "gone"]),
                    st.sampled_from(["first", "second", "empty"]),
                ),
                max_size=3,
            ),
        },
    ),
)
clusters = st.lists(policies, max_size=8, unique_by=lambda p: p.metadata.qualified_name)
SECRETS: Secrets = {
    "team/keys": {"first": KEY, "second": OTHER_KEY, "empty": None},
    "other/keys": {"first": KEY},
}
OTHERS = (
    a_tier("gold", 10, reservedSharePercent=60),
    a_tier(
        "closed", 5, allowedNamespaces={"from": "Selector", "selector": {"matchLabels": {"x": "y"}}}
    ),
    a_tier("standard", 1, globalDefault=True, reservedSharePercent=60),
    a_preemption_policy("gentle", maxPreemptionsPerRequest=1),
)


def compile_cluster(found: list[TenantPolicy]) -> CompiledPool:
    pool = an_engine_pool(allowedNamespaces={"from": "All"})
    return compile_of(pool, *found, *OTHERS, secrets=SECRETS)


def compile_of(
    pool: EnginePool, *objects: Resource, secrets: Secrets | None = None
) -> CompiledPool:
    view = a_view(pool, *objects, secrets=secrets)
    return compile_pool(view, view.pools["team/chat"])


@given(clusters, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_order_of_objects_makes_no_difference(
    found: list[TenantPolicy], random: "st.DataObject"
) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert compile_cluster(found) == compile_cluster(shuffled)


@given(clusters)
@settings(max_examples=60, deadline=None)
def test_any_cluster_compiles_to_what_engines_can_read(found: list[TenantPolicy]) -> None:
    compiled = compile_cluster(found)
    assert PolicySnapshot.from_text(compiled.snapshot.to_text()) == compiled.snapshot
    assert set(compiled.verdicts) == {policy.metadata.qualified_name for policy in found}


@given(clusters, clusters, st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_taken_over_from_an_earlier_compile_changes_nothing(
    found: list[TenantPolicy],
    others: list[TenantPolicy],
    has_secrets: bool,  # noqa: FBT001 - as drawn
    has_tiers: bool,  # noqa: FBT001
    has_labels: bool,  # noqa: FBT001
) -> None:
    before = compile_cluster(found)
    # Some objects are the very ones of before, others have the same name and other contents.
    named = {policy.metadata.qualified_name: policy for policy in (*found[::2], *others)}
    view = a_view(
        an_engine_pool(allowedNamespaces={"from": "All"}),
        *named.values(),
        *(OTHERS if has_tiers else OTHERS[1:]),
        secrets=SECRETS if has_secrets else {},
        namespaces={"team": {"x": "y"}} if has_labels else {},
    )
    (pool,) = view.pools.values()

    assert compile_pool(view, pool, before=before) == compile_pool(view, pool)


def test_only_what_has_changed_is_made_anew() -> None:
    policies = [a_tenant_policy(f"tenant-{number}") for number in range(3)]
    before = compile_of(an_engine_pool(), *policies)
    changed = a_tenant_policy("tenant-1", weight=7)
    view = a_view(an_engine_pool(), policies[0], changed, policies[2])

    after = compile_pool(view, view.pools["team/chat"], before=before)

    rules = zip(before.snapshot.tenants, after.snapshot.tenants, strict=True)
    assert [old is new for old, new in rules] == [True, False, True]
    name = "team/tenant-0"
    assert after.candidates[name] is before.candidates[name]


def test_what_another_policy_takes_away_and_gives_back_is_not_taken_over() -> None:
    pool = an_engine_pool()
    keys = [{"name": "keys", "key": "first"}, {"name": "keys", "key": "second"}]
    unchanged = a_tenant_policy("new", kv={"nominalPercent": 50}, apiKeySecretRefs=keys)
    wanting, modest = (
        a_tenant_policy("old", age=1, kv={"nominalPercent": percent}, apiKeySecretRefs=keys[:own])
        for percent, own in ((60, 1), (10, 0))
    )
    before = None

    for other, nominal, key_digests in (
        (modest, 50, {KEY, OTHER_KEY}),
        (wanting, 0, {OTHER_KEY}),
        (modest, 50, {KEY, OTHER_KEY}),
    ):
        view = a_view(pool, unchanged, other, secrets=SECRETS)
        before = compile_pool(view, pool, before=before)
        rule = before.snapshot.tenant_rules["team/new"]
        assert (rule.kv_nominal_percent, set(rule.key_digests)) == (nominal, key_digests)


BAD: list[Callable[[], TenantPolicy]] = [
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], tenant="unknown"),
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], priorityTier="closed"),
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], priorityTier="gone"),
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], tenant="one"),
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], kv={"nominalPercent": 100}),
    lambda: a_tenant_policy(
        "bad", age=-1, pools=["team/chat"], apiKeySecretRefs=[{"name": "gone", "key": "first"}]
    ),
    lambda: a_tenant_policy(
        "bad", age=-1, pools=["team/chat"], preemptionPolicyRef={"name": "gone"}
    ),
    lambda: a_tenant_policy("bad", age=-1, pools=["team/chat"], serviceLevelRef={"name": "gone"}),
]


@given(clusters, st.sampled_from(BAD))
@settings(max_examples=60, deadline=None)
def test_a_bad_newest_policy_changes_nobody_elses_rule(
    found: list[TenantPolicy], bad: Callable[[], TenantPolicy]
) -> None:
    before = {rule.policy: rule for rule in compile_cluster(found).snapshot.tenants}
    after = compile_cluster([*found, bad()]).snapshot.tenants
    assert {rule.policy: rule for rule in after if rule.policy != "team/bad"} == before
