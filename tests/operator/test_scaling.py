from collections.abc import Iterable
from typing import Any

import pytest

from tidegate_operator.cluster import PodView
from tidegate_operator.compiler import compile_pool
from tidegate_operator.resources import EnginePool, LabelSelector, WorkloadKind
from tidegate_operator.scaling import (
    SCALE_DOWN,
    ScalePlan,
    Victim,
    Workload,
    choose_victims,
    plan_scale,
    read_workload,
)
from tidegate_operator.verdicts import Reason
from tidegate_policies.wire import EngineReport, TenantCounters
from tidegate_testing.objects import a_pod_view, a_tenant_policy, a_tier, a_view, an_engine_pool

CREATED = "2026-01-01T00:00:00Z"
REF = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "engines"}


def a_scaled_pool(replicas: int | None, **spec: Any) -> EnginePool:
    given: dict[str, Any] = {} if replicas is None else {"replicas": replicas}
    return an_engine_pool(workloadRef=REF, **given, **spec)


def a_workload(
    replicas: int, *, kind: WorkloadKind = WorkloadKind.DEPLOYMENT, is_owned: bool = True
) -> Workload:
    return Workload(
        kind=kind,
        name="engines",
        replicas=replicas,
        selector=LabelSelector.model_validate({"matchLabels": {"app": "engine"}}),
        is_owned=is_owned,
    )


def raw_workload(*owners: dict[str, str], annotations: dict[str, str] | None = None) -> Any:  # noqa: ANN401
    """As the API server returns it; each owner has the replicas among its fields."""
    fields: dict[str, Any] = {"f:spec": {"f:replicas": {}}}
    return {
        "metadata": {
            "name": "engines",
            "creationTimestamp": CREATED,
            "annotations": annotations or {},
            "managedFields": [
                {"operation": "Update", "fieldsV1": fields, **owner} for owner in owners
            ],
        },
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "engine"}}},
    }


def a_report(pod: str, **blocks: int) -> EngineReport:
    return EngineReport(
        pool="team/chat",
        pod=pod,
        incarnation="i",
        sequence=1,
        kv_used_blocks=sum(blocks.values()),
        tenants=tuple(
            TenantCounters(tenant=f"team/{tenant}", kv_used_blocks=used)
            for tenant, used in blocks.items()
        ),
    )


def victims_of(
    pool: EnginePool,
    workload: Workload,
    pods: Iterable[PodView],
    *reports: EngineReport,
) -> list[str]:
    tiers = [a_tier("gold", 2), a_tier("silver", 1)]
    policies = [a_tenant_policy(name, priorityTier=name) for name in ("gold", "silver")]
    view = a_view(pool, *tiers, *policies)
    return [
        victim.name
        for victim in choose_victims(
            pool,
            workload,
            pods,
            reports={report.pod: report for report in reports},
            snapshot=compile_pool(view, pool).snapshot,
            is_quiet=lambda _: True,
        )
    ]


@pytest.mark.parametrize(
    ("owner", "annotations"),
    [
        ({"manager": "gitops", "operation": "Apply", "time": CREATED}, {}),
        ({"manager": "kube-controller-manager", "subresource": "scale"}, {}),
        (
            {"manager": "kubectl-client-side-apply", "time": CREATED},
            {"kubectl.kubernetes.io/last-applied-configuration": '{"spec": {"replicas": 2}}'},
        ),
    ],
)
def test_who_sets_the_replicas_again_and_again_claims_them(
    owner: dict[str, str], annotations: dict[str, str]
) -> None:
    raw = raw_workload(
        owner, {"manager": "tidegate", "operation": "Apply"}, annotations=annotations
    )
    workload = read_workload(WorkloadKind.DEPLOYMENT, raw)
    assert (workload.claims, workload.is_owned) == ((owner["manager"],), True)

    for wanted in (None, 2, 3):
        plan = plan_scale(a_scaled_pool(wanted), workload, (), ())
        assert [flaw.reason for flaw in plan.flaws] == [Reason.REPLICAS_CONFLICT]
        assert owner["manager"] in plan.flaws[0].message
        assert (plan.adopt, plan.replicas) == (None, None)


@pytest.mark.parametrize(
    "owner",
    [
        {"manager": "kubectl-create", "time": CREATED},
        {"manager": "helm", "time": CREATED},
        {"manager": "before-first-apply", "subresource": "scale"},
    ],
)
def test_who_merely_created_a_workload_owns_no_replicas(owner: dict[str, str]) -> None:
    workload = read_workload(WorkloadKind.DEPLOYMENT, raw_workload(owner))
    assert (workload.claims, workload.touches, workload.is_owned) == ((), (), False)

    assert plan_scale(a_scaled_pool(None), workload, (), ()) == ScalePlan(adopt=2)
    assert plan_scale(a_scaled_pool(2), workload, (), ()) == ScalePlan(replicas=2)
    assert plan_scale(a_scaled_pool(3), workload, (), ()) == ScalePlan(replicas=3)


def test_who_scaled_a_workload_by_hand_is_in_the_way_until_both_agree() -> None:
    touch = {"manager": "kubectl", "subresource": "scale"}
    workload = read_workload(WorkloadKind.DEPLOYMENT, raw_workload(touch))
    plan = plan_scale(a_scaled_pool(3), workload, (), ())
    assert [flaw.reason for flaw in plan.flaws] == [Reason.REPLICAS_CONFLICT]

    assert plan_scale(a_scaled_pool(2), workload, (), ()) == ScalePlan(replicas=2)
    agreed = raw_workload(touch, {"manager": "tidegate", "operation": "Apply"})
    workload = read_workload(WorkloadKind.DEPLOYMENT, agreed)
    assert plan_scale(a_scaled_pool(3), workload, (), ()) == ScalePlan(replicas=3)


def test_a_pool_that_has_its_replicas_is_let_alone() -> None:
    assert plan_scale(a_scaled_pool(2), a_workload(2), (), ()) == ScalePlan()


def test_replicas_are_lowered_only_once_every_victim_is_quiet() -> None:
    pool, workload = a_scaled_pool(1), a_workload(3)
    unmarked = Victim(name="a", is_marked=False, is_quiet=False)
    busy = Victim(name="b", is_marked=True, is_quiet=False)
    quiet = Victim(name="b", is_marked=True, is_quiet=True)

    plan = plan_scale(pool, workload, (), [unmarked, quiet])
    assert plan == ScalePlan(mark=("a",), is_waiting=True)
    assert plan_scale(pool, workload, (), [busy, quiet]) == ScalePlan(is_waiting=True)
    assert plan_scale(pool, workload, (), [quiet]) == ScalePlan(replicas=1)


def test_who_is_no_victim_any_more_goes_on() -> None:
    pods = [a_pod_view("a", draining=SCALE_DOWN), a_pod_view("b", draining="maintenance")]
    assert plan_scale(a_scaled_pool(2), a_workload(2), pods, ()) == ScalePlan(unmark=("a",))


def test_the_engine_with_the_fewest_tokens_goes_first_and_a_tier_counts_twice_the_one_below() -> (
    None
):
    pods = [a_pod_view(name) for name in "abcd"]
    reports = [
        a_report("a", gold=10),
        a_report("b", silver=30),
        a_report("c", silver=10, stranger=2),
        a_report("d", gold=4),
    ]
    # Weights are 4, 2 and 1: 40, 60, 22 and 16.
    order = [victims_of(a_scaled_pool(4 - n), a_workload(4), pods, *reports) for n in (1, 2, 3)]
    assert order == [["d"], ["d", "c"], ["d", "c", "a"]]


def test_the_oldest_goes_first_where_the_pool_says_so() -> None:
    pods = [a_pod_view("a", created="2026-01-02"), a_pod_view("b", created="2026-01-01")]
    pool = a_scaled_pool(1, drain={"victim": "Oldest"})
    assert victims_of(pool, a_workload(2), pods, a_report("b", gold=9)) == ["b"]


def test_pods_that_drain_or_are_not_ready_go_before_those_that_serve() -> None:
    pods = [
        a_pod_view("busy", draining=SCALE_DOWN),
        a_pod_view("idle"),
        a_pod_view("starting", is_ready=False),
    ]
    reports = [a_report("busy", gold=100), a_report("idle")]
    assert victims_of(a_scaled_pool(2), a_workload(3), pods, *reports) == ["busy"]
    assert victims_of(a_scaled_pool(1), a_workload(3), pods, *reports) == ["busy", "starting"]


def test_victims_stay_victims_until_they_are_deleted() -> None:
    pods = [a_pod_view("a", draining=SCALE_DOWN), a_pod_view("b"), a_pod_view("c")]
    assert victims_of(a_scaled_pool(2), a_workload(2), pods) == ["a"]
    # Of a rollout there are more pods than replicas, too.
    assert victims_of(a_scaled_pool(2), a_workload(2), [a_pod_view(n) for n in "abc"]) == []


def test_replicas_without_a_pod_cost_no_engine() -> None:
    pods = [a_pod_view("a"), a_pod_view("b")]
    assert victims_of(a_scaled_pool(2), a_workload(5), pods) == []


def test_the_pods_of_other_workloads_are_no_victims() -> None:
    other = a_pod_view("a")
    stray = PodView(namespace="team", name="z", uid="z", labels={"app": "other"})
    assert victims_of(a_scaled_pool(0), a_workload(1), [other, stray]) == ["a"]


def test_of_a_stateful_set_the_highest_ordinals_go() -> None:
    pods = [a_pod_view(f"engine-{number}") for number in (0, 2, 9, 10)]
    workload = a_workload(4, kind=WorkloadKind.STATEFUL_SET)
    reports = [a_report("engine-10", gold=100)]
    assert victims_of(a_scaled_pool(2), workload, pods, *reports) == ["engine-10", "engine-9"]
