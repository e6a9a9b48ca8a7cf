"""What the pages show, from what was read."""

import math
from typing import Any

import pytest

from tidegate_cli.console.fleet import Fleet, Past, PublishedPolicy
from tidegate_cli.console.views import NO_TIER, PoolView, TenantView, pool_views, tenant_views
from tidegate_policies.attainment import NEVER, bucket_of
from tidegate_policies.rules import ServiceRule, StopPolicy, TenantRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_policies.wire import (
    Attainment,
    EngineReport,
    LatencyCounts,
    Refusal,
    TenantCounters,
)
from tidegate_testing.policies import POOL, a_snapshot, a_tenant

TIERS = {"gold": 100, "bronze": 0}


def a_report(pod: str = "engine-0", *, revision: int = 3, **fields: Any) -> EngineReport:
    base: dict[str, Any] = {"incarnation": "a", "sequence": 1, "kv_blocks": 100}
    return EngineReport(pool=POOL, pod=pod, revision=revision, **base | fields)


def a_fleet(
    *reports: EngineReport,
    policy: PolicySnapshot | None = None,
    before: tuple[EngineReport, ...] = (),
    seconds: float = 10.0,
    **fields: Any,
) -> Fleet:
    past = {POOL: Past(seconds=seconds, reports={one.pod: one for one in before})}
    published = {POOL: PublishedPolicy(revision=3, snapshot=policy or a_snapshot())}
    known: dict[str, Any] = {
        "published": published,
        "reports": {POOL: {one.pod: one for one in reports}},
    }
    return Fleet(**known | ({"past": past} if before else {}) | fields)


def the_pool(fleet: Fleet) -> PoolView:
    (pool,) = pool_views(fleet)
    return pool


def the_tenants(fleet: Fleet) -> dict[str, TenantView]:
    return {view.tenant: view for view in tenant_views(fleet)}


def an_object(kind: str, status: str, reason: str, **more: object) -> dict[str, Any]:
    one = {"type": kind, "status": status, "reason": reason, "message": "Because."}
    status_of = {"conditions": [{**one, "observedGeneration": 4}], **more}
    return {"metadata": {"generation": 4}, "status": status_of}


def test_nothing_known_is_no_pool_and_no_tenant() -> None:
    assert pool_views(Fleet()) == []
    assert tenant_views(Fleet()) == []


def test_a_pool_adds_up_its_engines_and_shows_each() -> None:
    marks = WatermarkRule(low_percent=70, high_percent=85)
    pool = the_pool(
        a_fleet(
            a_report("engine-1", kv_used_blocks=80, running=2, waiting=1),
            a_report("engine-0", kv_used_blocks=20, running=1, swapped=4),
            policy=a_snapshot(watermarks=marks),
        )
    )
    assert [engine.pod for engine in pool.engines] == ["engine-0", "engine-1"]
    assert [engine.kv_percent for engine in pool.engines] == [20, 80]
    assert (pool.kv_percent, pool.watermarks) == (50, marks)
    assert pool.output_tokens_per_second is None


def test_the_batch_is_told_by_tenant_and_the_queue_by_tier_from_the_highest() -> None:
    counters = (
        TenantCounters(tenant="acme", running=2, waiting=5),
        TenantCounters(tenant="zeta", waiting=1),
        TenantCounters(tenant="stranger", waiting=3),
    )
    policy = a_snapshot(a_tenant("acme", tier="bronze"), a_tenant("zeta", tier="gold"), tiers=TIERS)
    pool = the_pool(a_fleet(a_report(tenants=counters), policy=policy))
    assert pool.batch == (("acme", 2),)
    assert [(queue.tier, queue.waiting) for queue in pool.queue] == [
        ("gold", (("zeta", 1),)),
        ("bronze", (("acme", 5),)),
        (NO_TIER, (("stranger", 3),)),
    ]


def test_an_engine_behind_the_newest_revision_is_a_laggard_whoever_knows_of_it() -> None:
    status = an_object("Programmed", "False", "Pending", policy={"revision": 5})
    pool = the_pool(
        a_fleet(a_report("engine-0", revision=5), a_report("engine-1"), pools={POOL: status})
    )
    assert pool.revision == 5
    assert [engine.lag for engine in pool.engines] == [0, 2]
    assert pool.laggards == ["engine-1"]
    assert (pool.programmed.is_good, pool.programmed.word) == (False, "Pending")


def test_a_ready_engine_that_does_not_report_is_shown_as_silent() -> None:
    status = an_object("Programmed", "False", "Pending", laggards=["engine-9"])
    pool = the_pool(a_fleet(a_report(), pools={POOL: status}))
    assert [(engine.pod, engine.is_silent) for engine in pool.engines] == [
        ("engine-0", False),
        ("engine-9", True),
    ]
    assert pool.laggards == ["engine-9"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"degraded": True}, "degraded"),
        (
            {"refused": Refusal(revision=4, reason="BadSignature", message="no")},
            "refused revision 4: no",
        ),
    ],
)
def test_what_troubles_an_engine_is_told_in_words(fields: dict[str, Any], words: str) -> None:
    (engine,) = the_pool(a_fleet(a_report(**fields))).engines
    assert words in engine.trouble


def test_a_verdict_on_an_earlier_generation_counts_for_nothing() -> None:
    status = an_object("Programmed", "True", "Programmed")
    status["metadata"]["generation"] = 5
    pool = the_pool(a_fleet(a_report(), pools={POOL: status}))
    assert (pool.programmed.is_good, pool.programmed.word) == (None, "not judged yet")


def test_step_time_is_the_mean_since_the_past_report_of_the_same_process() -> None:
    before = a_report(steps=100, step_seconds=5.0)
    now = a_report(steps=150, step_seconds=6.0)
    assert the_pool(a_fleet(now, before=(before,))).step_seconds == pytest.approx(0.02)
    assert the_pool(a_fleet(before, before=(before,))).step_seconds is None
    restarted = a_report(incarnation="b", steps=150, step_seconds=6.0)
    assert the_pool(a_fleet(restarted, before=(before,))).step_seconds is None


def test_share_is_of_the_tier_and_due_is_by_weight_among_those_with_work() -> None:
    policy = a_snapshot(
        a_tenant("acme", tier="gold", weight=300),
        a_tenant("zeta", tier="gold", weight=100),
        a_tenant("idle", tier="gold", weight=100),
        a_tenant("other", tier="bronze"),
        tiers=TIERS,
    )

    def of(**service: float) -> EngineReport:
        return a_report(
            tenants=tuple(
                TenantCounters(tenant=name, service=cost) for name, cost in service.items()
            )
        )

    before = of(acme=100, zeta=100, idle=70, other=0)
    now = of(acme=160, zeta=140, idle=70, other=500)
    fleet = a_fleet(now, before=(before,), policy=policy)
    tenants = the_tenants(fleet)
    assert list(tenants) == ["acme", "idle", "zeta", "other"]
    assert (tenants["acme"].share_percent, tenants["acme"].due_percent) == (60, 75)
    assert (tenants["zeta"].share_percent, tenants["zeta"].due_percent) == (40, 25)
    assert (tenants["idle"].share_percent, tenants["idle"].due_percent) == (0, 20)
    assert (tenants["other"].share_percent, tenants["other"].due_percent) == (100, 100)
    assert tenants["acme"].cost == 160


def test_the_first_service_of_a_tenant_counts_from_nothing() -> None:
    first = TenantCounters(tenant="acme", service=50, output_tokens=20)
    fleet = a_fleet(a_report(tenants=(first,)), before=(a_report(),))
    acme = the_tenants(fleet)["acme"]
    assert acme.share_percent == 100
    assert acme.activity.output_tokens_per_second == 2.0
    # What a process did before it was first heard is not of the last while.
    restarted = a_report(incarnation="b", tenants=(first,))
    assert the_tenants(a_fleet(restarted, before=(a_report(),)))["acme"].share_percent is None


def a_promise(**service: Any) -> PolicySnapshot:
    return a_snapshot(a_tenant("acme", kv_nominal_percent=20, service=ServiceRule(**service)))


def test_latencies_of_all_engines_are_held_against_the_target() -> None:
    def part(met: int, seconds: float, requests: int) -> TenantCounters:
        counts = LatencyCounts(
            target_seconds=0.5, met=met, buckets=((bucket_of(seconds), requests),)
        )
        return TenantCounters(
            tenant="acme",
            kv_used_blocks=15,
            attainment=Attainment(requests=requests, met=met, ttft=counts),
        )

    fleet = a_fleet(
        a_report("engine-0", tenants=(part(met=96, seconds=0.2, requests=96),)),
        a_report("engine-1", tenants=(part(met=0, seconds=2.0, requests=4),)),
        policy=a_promise(ttft_seconds=0.5, ttft_percentile=95),
    )
    acme = the_tenants(fleet)["acme"]
    assert acme.ttft is not None
    assert acme.ttft.is_met
    assert 0.2 <= (acme.ttft.seconds or 0) < 0.23
    assert acme.attained_percent == 96
    assert (acme.kv_percent, acme.nominal_percent) == (15, 20)
    assert acme.itl is None


def test_first_tokens_that_never_come_miss_the_target() -> None:
    counts = LatencyCounts(target_seconds=0.5, met=1, buckets=((bucket_of(0.1), 1), (NEVER, 9)))
    counters = TenantCounters(tenant="acme", attainment=Attainment(requests=10, met=1, ttft=counts))
    fleet = a_fleet(a_report(tenants=(counters,)), policy=a_promise(ttft_seconds=0.5))
    ttft = the_tenants(fleet)["acme"].ttft
    assert ttft is not None
    assert (ttft.seconds, ttft.is_met) == (math.inf, False)


def test_a_target_without_traffic_is_shown_without_a_figure() -> None:
    acme = the_tenants(a_fleet(a_report(), policy=a_promise(itl_seconds=0.05)))["acme"]
    assert acme.ttft is None
    assert acme.itl is not None
    assert (acme.itl.seconds, acme.itl.target_seconds) == (None, 0.05)


def test_a_stopped_tenant_says_so_whatever_its_object_says() -> None:
    def state(rule: TenantRule, **policies: Any) -> tuple[bool | None, str]:
        fleet = a_fleet(
            policy=a_snapshot(rule), policies={"teams/acme": policies} if policies else {}
        )
        verdict = the_tenants(fleet)["acme"].state
        return verdict.is_good, verdict.word

    ready = an_object("Ready", "True", "Ready")
    assert state(a_tenant("acme"), **ready) == (True, "Ready")
    assert state(a_tenant("acme", stop=StopPolicy.DRAIN), **ready) == (False, "stopped: Drain")
    assert state(a_tenant("acme"), **an_object("Ready", "False", "Missed")) == (False, "Missed")
    assert state(a_tenant("acme")) == (None, "unknown")
