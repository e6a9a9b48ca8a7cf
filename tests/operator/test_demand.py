from typing import Any

import pytest

from tidegate_operator.demand import Demand, demand
from tidegate_policies.attainment import NEVER, bucket_of, upper_bound
from tidegate_policies.wire import Attainment, EngineReport, TenantCounters
from tidegate_testing.objects import an_engine_pool, engines

WAITED_2_SECONDS = ((bucket_of(2.0), 10),)


def a_report(pod: str = "a", *, missed: int = 0, **fields: Any) -> EngineReport:
    attainment = Attainment(requests=100, met=100 - missed) if missed else None
    values: dict[str, Any] = {"kv_blocks": 100, "block_size": 16, **fields}
    return EngineReport(
        pool="team/chat",
        pod=pod,
        incarnation="i",
        sequence=1,
        tenants=(TenantCounters(tenant="t", attainment=attainment),),
        **values,
    )


def desired(*reports: EngineReport, **autoscaling: Any) -> int:
    pool = an_engine_pool(autoscaling={"maxReplicas": 9, **autoscaling})
    return demand(pool, engines(*reports)).desired_replicas


@pytest.mark.parametrize("reports", [[], [a_report("a"), a_report("b")]])
def test_without_traffic_every_signal_is_0(reports: list[EngineReport]) -> None:
    targets = {"maxReplicas": 9, "queueTimeP99": "1s", "sloAttainmentPercent": 99}
    assert demand(an_engine_pool(autoscaling=targets), engines(*reports)) == Demand()
    assert demand(an_engine_pool(), engines(*reports)) == Demand()


def test_kv_asks_for_as_many_engines_as_hold_it_at_the_percentage_aimed_at() -> None:
    reports = [a_report("a", kv_used_blocks=90), a_report("b", kv_used_blocks=30)]
    assert desired(*reports, kvUtilizationPercent=60) == 2
    assert desired(*reports, kvUtilizationPercent=59) == 3
    # Without a target: the low watermark, which is 80.
    assert desired(a_report(kv_used_blocks=80)) == 1
    assert desired(a_report(kv_used_blocks=81)) == 2


def test_prompts_that_wait_will_need_kv_too() -> None:
    one, two = (a_report(pod, kv_used_blocks=80, waiting_tokens=16 * 80) for pod in "ab")
    assert desired(one) == 2
    assert demand(an_engine_pool(), engines(one, two)).waiting_tokens == 32 * 80


def test_a_queue_that_is_too_slow_asks_for_more_up_to_twice_as_many() -> None:
    reports = [a_report(pod, queue_times=WAITED_2_SECONDS) for pod in "abcd"]
    waited = upper_bound(bucket_of(2.0))
    assert demand(an_engine_pool(), engines(*reports)).queue_time_p99_seconds == waited
    assert desired(*reports, queueTimeP99="3s") == 0
    assert desired(*reports, queueTimeP99="1800ms") == 5
    assert desired(*reports, queueTimeP99="10ms") == 8


def test_service_levels_that_are_missed_ask_for_more() -> None:
    reports = [a_report("a", missed=3), a_report("b", missed=3), a_report("c")]
    assert demand(an_engine_pool(), engines(*reports)).slo_miss_ratio == 0.03
    assert desired(*reports, sloAttainmentPercent=97) == 0
    assert desired(*reports, sloAttainmentPercent=98) == 5
    assert desired(*reports, sloAttainmentPercent=100) == 6


def test_a_time_that_never_ended_counts_as_a_day() -> None:
    report = a_report(queue_times=((NEVER, 1),))
    assert demand(an_engine_pool(), engines(report)).queue_time_p99_seconds == 86_400


def test_engines_that_are_silent_are_taken_for_needed() -> None:
    found = engines(a_report(kv_used_blocks=10), silent=("b", "c"))
    assert demand(an_engine_pool(), found).desired_replicas == 3
