from tidegate_operator.usage import ActivityInForce, TenantActivity, UsageMeter, tenant_usage
from tidegate_policies.wire import Attainment, EngineReport, TenantCounters
from tidegate_testing.policies import a_tenant


def a_report(pod: str, incarnation: str = "i", **counters: object) -> EngineReport:
    return EngineReport(
        pool="p",
        pod=pod,
        incarnation=incarnation,
        sequence=1,
        running=1,
        swapped=2,
        kv_blocks=100,
        kv_used_blocks=10,
        tenants=(TenantCounters(tenant="t", **counters),),  # type: ignore[arg-type]
    )


def test_first_call_only_opens_the_window() -> None:
    assert UsageMeter().sample([a_report("a", output_tokens=100)], now=5.0) is None


def test_rates_are_means_over_the_window_and_all_engines() -> None:
    meter = UsageMeter()
    meter.sample([a_report("a", output_tokens=100), a_report("b", service=1.0)], now=5.0)
    activity = meter.sample(
        [a_report("a", output_tokens=150), a_report("b", output_tokens=50, service=4.0)], now=15.0
    )
    assert activity is not None
    tenant = activity.tenants["t"]
    assert (tenant.output_tokens_per_second, tenant.service) == (10.0, 3.0)
    assert (activity.running, activity.kv_blocks, activity.kv_used_blocks) == (2, 200, 20)


def test_swapped_requests_and_borrowed_blocks_are_those_of_now_over_all_engines() -> None:
    meter = UsageMeter()
    meter.sample([a_report("a", swapped=9, kv_borrowed_blocks=90)], now=5.0)
    activity = meter.sample(
        [a_report("a", swapped=1, kv_borrowed_blocks=4), a_report("b", swapped=2)], now=15.0
    )
    assert activity is not None
    tenant = activity.tenants["t"]
    assert (tenant.swapped, tenant.kv_borrowed_blocks, activity.swapped) == (3, 4, 4)


def test_restarted_engine_counts_from_its_next_window() -> None:
    meter = UsageMeter()
    meter.sample([a_report("a", output_tokens=1000)], now=0.0)
    activity = meter.sample([a_report("a", "other", output_tokens=10)], now=10.0)
    assert activity is not None
    assert activity.tenants["t"].output_tokens_per_second == 0.0


def test_tenant_without_work_or_service_is_idle() -> None:
    meter = UsageMeter()
    meter.sample([a_report("a", cancelled=3, output_tokens=9)], now=0.0)
    activity = meter.sample([a_report("a", cancelled=3, output_tokens=9)], now=10.0)
    assert activity is not None
    assert activity.tenants["t"].is_idle


def test_tenant_whose_requests_were_all_refused_in_the_window_is_not_idle() -> None:
    meter = UsageMeter()
    meter.sample([a_report("a", shed=3)], now=0.0)
    busy = meter.sample([a_report("a", shed=5), a_report("b", shed=4)], now=10.0)
    assert busy is not None
    assert not busy.tenants["t"].is_idle
    assert (busy.tenants["t"].shed, busy.tenants["t"].shed_in_window) == (9, 2)
    rests = meter.sample([a_report("a", shed=5), a_report("b", shed=4)], now=20.0)
    assert rests is not None
    assert rests.tenants["t"].is_idle


def test_attainments_are_those_of_now_of_every_engine() -> None:
    one, other = Attainment(requests=1, met=1), Attainment(requests=2, met=0)
    meter = UsageMeter()
    meter.sample([a_report("a", attainment=other)], now=0.0)
    activity = meter.sample(
        [a_report("a", attainment=one), a_report("b", attainment=other), a_report("c")], now=10.0
    )
    assert activity is not None
    assert activity.tenants["t"].attainments == (one, other)


def test_tenant_whose_requests_are_all_swapped_is_not_idle() -> None:
    assert not TenantActivity(swapped=1).is_idle


def test_a_stop_takes_as_long_as_in_the_slowest_engine_and_is_shown_when_all_are_done() -> None:
    def stop_time(**seconds: float | None) -> object:
        meter = UsageMeter()
        reports = [a_report(pod, cancelled=1, stop_seconds=s) for pod, s in seconds.items()]
        meter.sample(reports, now=0.0)
        activity = meter.sample(reports, now=10.0)
        assert activity is not None
        usage = tenant_usage([ActivityInForce(activity, {"t": a_tenant("t")}, "t")])
        return (usage or {}).get("stopTime")

    assert stop_time(a=0.0421, b=0.005) == "43ms"
    assert stop_time(a=0.0421, b=None) is None
