from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from tidegate_operator.cluster import ClusterView, InvalidObject
from tidegate_operator.compiler import compile_pool
from tidegate_operator.planner import (
    PoolState,
    StatusUpdate,
    plan_invalid_status,
    plan_plain_status,
    plan_policy_status,
    plan_pool_status,
)
from tidegate_operator.progress import Engines, Published
from tidegate_operator.resources import (
    EnginePool,
    EnginePoolStatus,
    ObjectMeta,
    TenantPolicy,
    TenantPolicyStatus,
)
from tidegate_operator.usage import PoolActivity, TenantActivity
from tidegate_operator.verdicts import Flaw, Reason
from tidegate_policies.attainment import bucket_of
from tidegate_policies.wire import Attainment, EngineReport, LatencyCounts
from tidegate_testing.objects import (
    a_pod_view,
    a_service_level,
    a_tenant_policy,
    a_tier,
    a_view,
    an_engine_pool,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)


def a_state(
    view: ClusterView, key: str = "team/chat", *, revision: int = 0, **runs: int
) -> PoolState:
    """Build a pool whose pods run the given revisions; a published revision holds it all.

    Pods at the published revision run the published policy.
    """
    pool = view.pools[key]
    compiled = compile_pool(view, pool)
    digest = compiled.snapshot.digest
    reports = {
        pod: EngineReport(
            pool=key,
            pod=pod,
            incarnation="i",
            sequence=1,
            revision=run,
            digest=digest if run == revision else "",
            kv_blocks=100,
            host_blocks=50,
        )
        for pod, run in runs.items()
    }
    published = Published(revision=revision, digest=digest, time="2026-01-01T00:00:00Z")
    engines = Engines(
        pods=tuple(a_pod_view(pod) for pod in runs),
        reports=reports,
        published=published if revision else None,
    )
    return PoolState(pool=pool, compiled=compiled, engines=engines)


def plan(
    view: ClusterView,
    *states: PoolState,
    policy: TenantPolicy | None = None,
    known: dict[str, Any] | None = None,
    now: datetime = NOW,
) -> StatusUpdate:
    found = policy or next(iter(view.policies.values()))
    by_key = {state.compiled.pool: state for state in states}
    update = plan_policy_status(view, found, by_key, known=known or {}, now=now)
    TenantPolicyStatus.model_validate(update.status)
    return update


def reasons(update: StatusUpdate) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c["reason"]) for c in update.status["conditions"]}


def test_policy_that_every_engine_runs_is_programmed_and_ready() -> None:
    view = a_view(
        an_engine_pool(), a_tenant_policy(generation=3), a_tier("gold", globalDefault=True)
    )
    update = plan(view, a_state(view, revision=7, a=7, b=7))
    assert reasons(update) == {
        "Accepted": ("True", "Accepted"),
        "ResolvedRefs": ("True", "ResolvedRefs"),
        "Programmed": ("True", "Programmed"),
        "Ready": ("True", "Ready"),
    }
    status = update.status
    assert (status["observedGeneration"], status["tenant"], status["tier"]) == (
        3,
        "team/acme",
        "gold",
    )
    assert status["pools"] == [
        {
            "name": "chat",
            "namespace": "team",
            "accepted": True,
            "reason": "Accepted",
            "revision": 7,
            "programmedTime": "2026-01-01T00:00:00Z",
        }
    ]
    assert update.is_settled


def test_planning_again_changes_nothing() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7)
    known = plan(view, state).status
    assert plan(view, state, known=known, now=LATER).status == known
    pool = plan_pool_status(state, known={}, now=NOW).status
    EnginePoolStatus.model_validate(pool)
    assert plan_pool_status(state, known=pool, now=LATER).status == pool


def test_revision_stays_the_first_that_holds_the_generation() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    known = plan(view, a_state(view, revision=7, a=7)).status
    later = plan(view, a_state(view, revision=9, a=8), known=known, now=LATER)
    assert later.status == known


def test_new_generation_is_held_by_the_revision_of_equal_content() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    known = plan(view, a_state(view, revision=7, a=7)).status
    view = a_view(an_engine_pool(), a_tenant_policy(generation=2))
    update = plan(view, a_state(view, revision=9, a=9), known=known, now=LATER)
    (entry,) = update.status["pools"]
    assert (entry["revision"], entry["programmedTime"]) == (9, "2026-01-01T01:00:00Z")


def test_recorded_revision_beyond_the_newest_is_not_believed() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    known = plan(view, a_state(view, revision=70, a=70)).status
    update = plan(view, a_state(view, revision=2, a=2), known=known)
    assert update.status["pools"][0]["revision"] == 2


def test_policy_that_is_not_published_is_pending_and_unsettled() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy(generation=2))
    unpublished = a_state(view, a=7)
    older = Published(revision=7, digest="of older content", time="t")
    stale = replace(unpublished, engines=replace(unpublished.engines, published=older))
    for state in (stale, unpublished):
        update = plan(view, state)
        assert reasons(update)["Programmed"] == ("False", "Pending")
        assert "revision" not in update.status["pools"][0]
        assert not update.is_settled


def test_lagging_engine_is_named_and_the_status_may_wait() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    update = plan(view, a_state(view, revision=7, a=7, b=6))
    assert reasons(update)["Ready"] == ("False", "EnginesLagging")
    assert not update.is_settled


def test_conflict_takes_the_policy_out_and_removes_programmed() -> None:
    winner = a_tenant_policy("old", age=1, tenant="t")
    loser = a_tenant_policy("new", tenant="t")
    view = a_view(an_engine_pool(), winner, loser)
    state = a_state(view, revision=7, a=7)
    known = plan(view, state, policy=winner).status
    update = plan(view, state, policy=loser, known=known)
    assert reasons(update) == {
        "Accepted": ("False", "TenantConflict"),
        "ResolvedRefs": ("True", "ResolvedRefs"),
        "Ready": ("False", "TenantConflict"),
    }
    assert update.status["pools"] == [
        {"name": "chat", "namespace": "team", "accepted": False, "reason": "TenantConflict"}
    ]


def test_each_pool_has_its_own_verdict_and_the_worst_is_programmed() -> None:
    policy = a_tenant_policy(pools=["chat", "code", "gone"])
    view = a_view(an_engine_pool("chat"), an_engine_pool("code"), policy)
    update = plan(view, a_state(view, revision=7, a=7), a_state(view, "team/code", revision=3, b=2))
    verdicts = [(e["name"], e["accepted"], e["reason"]) for e in update.status["pools"]]
    assert verdicts == [
        ("chat", True, "Accepted"),
        ("code", True, "Accepted"),
        ("gone", False, "PoolNotFound"),
    ]
    assert reasons(update)["Accepted"] == ("True", "Accepted")
    assert reasons(update)["ResolvedRefs"] == ("False", "PoolNotFound")
    assert reasons(update)["Programmed"] == ("False", "EnginesLagging")


def test_one_silent_engine_rewrites_no_policy() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7, b=7)
    known = plan(view, state).status
    reports = {"a": state.engines.reports["a"]}
    silent = replace(state, engines=replace(state.engines, reports=reports))
    assert plan(view, silent, known=known, now=LATER).status == known
    pool = plan_pool_status(silent, known={}, now=NOW).status
    assert (pool["laggards"], pool["engines"]["programmed"]) == (["b"], 1)


def test_pool_counts_its_engines_and_names_its_policy() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7, b=7)
    pods = (*state.engines.pods, a_pod_view("c", is_ready=False))
    update = plan_pool_status(
        replace(state, engines=replace(state.engines, pods=pods)), known={}, now=NOW
    )
    status = update.status
    assert status["engines"] == {"ready": 2, "programmed": 2, "summary": "2/3"}
    assert (status["replicas"], status["selector"]) == (3, "app=engine")
    assert status["policy"]["revision"] == 7
    assert status["capacity"] == {"kvBlocks": 200, "hostBlocks": 100}
    assert reasons(update)["Degraded"] == ("False", "PolicyCurrent")
    assert reasons(update)["Ready"] == ("True", "Ready")


def test_only_ready_engines_add_to_the_capacity() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7, b=7)
    pods = (a_pod_view("a"), a_pod_view("b", is_ready=False))
    state = replace(state, engines=replace(state.engines, pods=pods))
    status = plan_pool_status(state, known={}, now=NOW).status
    assert status["capacity"] == {"kvBlocks": 100, "hostBlocks": 50}


def test_without_redis_a_pool_keeps_what_was_last_heard_and_is_degraded() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7)
    known = plan_pool_status(state, known={}, now=NOW).status
    cut_off = replace(state, is_redis_reachable=False, engines=replace(state.engines, reports={}))
    update = plan_pool_status(cut_off, known=known, now=LATER)
    assert reasons(update)["Programmed"] == ("True", "Programmed")
    assert reasons(update)["Degraded"] == ("True", "RedisUnreachable")
    assert reasons(update)["Ready"] == ("False", "RedisUnreachable")
    assert update.status["engines"] == known["engines"]


def test_usage_is_shown_while_there_is_some() -> None:
    view = a_view(
        an_engine_pool(), a_tenant_policy("acme"), a_tenant_policy("other"), a_tenant_policy("idle")
    )
    activity = PoolActivity(
        running=3,
        kv_blocks=200,
        kv_used_blocks=50,
        tenants={
            "team/acme": TenantActivity(
                running=3, kv_used_blocks=50, output_tokens_per_second=123.4, service=75.0
            ),
            "team/other": TenantActivity(service=25.0),
            "team/idle": TenantActivity(),
        },
    )
    state = replace(a_state(view, revision=7, a=7), activity=activity)
    usage = plan(view, state, policy=view.policies["team/acme"]).status["usage"]
    assert (usage["running"], usage["kvPercent"], usage["sharePercent"]) == (3, 25, 75)
    assert usage["outputTokensPerSecond"] == 120
    assert "usage" not in plan(view, state, policy=view.policies["team/idle"]).status
    assert plan_pool_status(state, known={}, now=NOW).status["usage"]["kvPercent"] == 25


def test_totals_of_a_tenant_at_rest_stay_as_they_are() -> None:
    view = a_view(an_engine_pool("chat"), a_tenant_policy(pools=["chat"]))
    acme = TenantActivity(
        prompt_tokens=10,
        cached_tokens=20,
        output_tokens=30,
        recomputed_tokens=5,
        kv_seconds=7.6,
        preempted=1,
        cancelled=2,
        shed=3,
    )
    activity = PoolActivity(kv_blocks=100, tenants={"team/acme": acme})
    state = replace(a_state(view, "team/chat", revision=7, a=7), activity=activity)
    status = plan(view, state).status
    assert {name: count for name, count in status["usage"].items() if count} == {
        "promptTokens": 10,
        "cachedTokens": 20,
        "outputTokens": 30,
        "recomputedTokens": 5,
        "kvSeconds": 8,
        "preempted": 1,
        "cancelled": 2,
        "shed": 3,
    }
    TenantPolicyStatus.model_validate(status)
    assert plan(view, state, known=status).status == status


def test_swapped_requests_and_borrowed_blocks_are_shown_over_all_pools() -> None:
    policy = a_tenant_policy(pools=["chat", "code"])
    view = a_view(an_engine_pool("chat"), an_engine_pool("code"), policy)
    acme = TenantActivity(swapped=2, kv_used_blocks=40, kv_borrowed_blocks=15)
    activity = PoolActivity(
        swapped=5, kv_blocks=100, kv_used_blocks=40, tenants={"team/acme": acme}
    )
    states = [
        replace(a_state(view, key, revision=7, a=7), activity=activity)
        for key in ("team/chat", "team/code")
    ]
    usage = plan(view, *states).status["usage"]
    assert (usage["swapped"], usage["kvPercent"], usage["borrowedPercent"]) == (4, 40, 15)
    pool = plan_pool_status(states[0], known={}, now=NOW).status
    EnginePoolStatus.model_validate(pool)
    assert pool["usage"]["swapped"] == 5


def test_service_level_is_judged_over_all_pools_and_ready_takes_it_in() -> None:
    policy = a_tenant_policy(
        pools=["chat", "code"],
        serviceLevel={"ttft": {"target": "500ms", "percentile": 90}, "window": "1m"},
    )
    view = a_view(an_engine_pool("chat"), an_engine_pool("code"), policy)

    def an_attainment(*, met: int, missed: int) -> Attainment:
        buckets = ((bucket_of(0.1), met), (bucket_of(2.0), missed))
        counts = LatencyCounts(target_seconds=0.5, met=met, buckets=buckets)
        return Attainment(requests=met + missed, met=met, ttft=counts)

    def states(*attainments: Attainment) -> list[PoolState]:
        acme = TenantActivity(running=1, attainments=attainments)
        activity = PoolActivity(kv_blocks=100, tenants={"team/acme": acme})
        others = PoolActivity(kv_blocks=100)
        return [
            replace(a_state(view, "team/chat", revision=7, a=7), activity=activity),
            replace(a_state(view, "team/code", revision=7, a=7), activity=others),
        ]

    met = plan(view, *states(an_attainment(met=8, missed=2), an_attainment(met=10, missed=0)))
    assert reasons(met)["ServiceLevelMet"] == ("True", "ServiceLevelMet")
    assert reasons(met)["Ready"] == ("True", "Ready")
    figures = {"ttft": "100ms", "attainmentPercent": 90, "window": "1m"}
    assert met.status["serviceLevel"] == figures
    missed = plan(
        view,
        *states(an_attainment(met=7, missed=3), an_attainment(met=10, missed=0)),
        known=met.status,
        now=LATER,
    )
    assert reasons(missed)["ServiceLevelMet"] == ("False", "Missed")
    assert reasons(missed)["Ready"] == ("False", "Missed")
    unknown = [replace(state, activity=None) for state in states()]
    assert plan(view, *unknown, known=missed.status, now=LATER).status == missed.status
    rests = plan(view, *states(), known=missed.status, now=LATER)
    assert "ServiceLevelMet" not in reasons(rests)
    assert reasons(rests)["Ready"] == ("True", "Ready")
    assert "serviceLevel" not in rests.status


def test_what_was_shed_is_shown() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    shed = TenantActivity(shed=7, shed_in_window=2)
    activity = PoolActivity(kv_blocks=100, tenants={"team/acme": shed})
    state = replace(a_state(view, revision=7, a=7), activity=activity)
    assert plan(view, state).status["usage"]["shed"] == 7


def test_usage_at_rest_changes_nothing() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    rests = PoolActivity(kv_blocks=100, tenants={"team/acme": TenantActivity(preempted=3)})
    state = replace(a_state(view, revision=7, a=7), activity=rests)
    policy = plan(view, state).status
    pool = plan_pool_status(state, known={}, now=NOW).status
    assert "usage" not in policy
    assert plan(view, state, known=policy, now=LATER).status == policy
    assert plan_pool_status(state, known=pool, now=LATER).status == pool


def test_usage_is_kept_until_the_first_window_is_over() -> None:
    view = a_view(an_engine_pool(), a_tenant_policy())
    state = a_state(view, revision=7, a=7)
    known = {**plan(view, state).status, "usage": {"running": 5}}
    assert plan(view, state, known=known).status == known


def test_plain_objects_have_accepted_and_ready() -> None:
    level = a_service_level("interactive", window="1m")
    update = plan_plain_status(level, [], known={}, now=NOW)
    assert reasons(update) == {"Accepted": ("True", "Accepted"), "Ready": ("True", "Ready")}
    tier = a_tier("gold")
    flaw = Flaw(Reason.TIER_CONFLICT, "another is older")
    update = plan_plain_status(tier, [flaw], known={}, now=NOW)
    assert reasons(update)["Ready"] == ("False", "TierConflict")


def test_object_that_cannot_be_read_is_invalid() -> None:
    metadata = ObjectMeta(name="acme", namespace="team", uid="u", generation=4)
    invalid = InvalidObject(model=TenantPolicy, metadata=metadata, problem="spec.weight: too big")
    update = plan_invalid_status(invalid, known={}, now=NOW)
    assert reasons(update) == {"Accepted": ("False", "Invalid"), "Ready": ("False", "Invalid")}
    assert update.status["conditions"][0]["message"] == "spec.weight: too big"


def test_pool_that_cannot_be_read_any_more_keeps_what_engines_and_scalers_rely_on() -> None:
    view = a_view(an_engine_pool())
    known = plan_pool_status(a_state(view, revision=7, a=7), known={}, now=NOW).status
    metadata = ObjectMeta(name="chat", namespace="team", uid="u", generation=2)
    invalid = InvalidObject(model=EnginePool, metadata=metadata, problem="spec.kv: bad")
    status = plan_invalid_status(invalid, known=known, now=NOW).status
    EnginePoolStatus.model_validate(status)
    for name in ("policy", "replicas", "selector"):
        assert status[name] == known[name]
