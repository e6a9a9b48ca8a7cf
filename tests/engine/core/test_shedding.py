"""Arrivals that would be served too late: predicted, and refused where the policy says so."""

from itertools import count

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.request import Rejection, RejectionCode
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import ServiceRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation

SHED_AFTER_1_S = ServiceRule(ttft_seconds=1.0, sheds=True)
DEAR_DECODES = AffineCost(
    ExecutorCosts(step_seconds=0.002, prefill_token_seconds=0.0005, decode_seconds=0.01)
)
_numbers = count(1)


def an_engine(policy: PolicySnapshot, *, blocks: int = 1000, slots: int = 4) -> Simulation:
    return a_simulation(policy, blocks=blocks, max_num_seqs=slots, check_every=50)


def arrive(
    engine: Simulation,
    tenant: str = "acme",
    *,
    times: int = 1,
    prompt: int = 20,
    output: int = 100,
    ttft_seconds: float | None = None,
    arrived_at: float | None = None,
) -> list[Rejection | None]:
    return [
        engine.submit(
            a_request(
                tenant,
                prompt=a_prompt(next(_numbers), prompt),
                output=output,
                ttft_seconds=ttft_seconds,
                arrived_at=arrived_at,
            )
        )
        for _ in range(times)
    ]


def codes(rejections: list[Rejection | None]) -> list[RejectionCode | None]:
    return [None if r is None else r.code for r in rejections]


def first_tokens(engine: Simulation) -> list[float]:
    times = [timeline.ttft_seconds for timeline in engine.log.requests.values()]
    return [seconds for seconds in times if seconds is not None]


def test_who_would_wait_beyond_its_target_is_refused_and_told_for_how_long() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    arrive(engine, times=4)
    engine.step()
    refused = [r for r in arrive(engine, times=40) if r is not None]
    assert refused
    assert {r.code for r in refused} == {RejectionCode.SHED}
    assert all(r.retry_after_seconds is not None and r.retry_after_seconds > 0 for r in refused)
    assert "target" in refused[0].message


def test_who_is_let_in_gets_its_first_token_about_when_it_was_due() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    for _ in range(30):
        arrive(engine, times=2, output=30)
        engine.step()
    engine.drain()
    waits = first_tokens(engine)
    rejections = [t for t in engine.log.requests.values() if t.rejection is not None]
    assert len(waits) >= 8
    assert rejections
    assert max(waits) <= 1.5


def test_who_has_waited_already_is_predicted_to_be_later_by_that() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    engine.clock.advance(5.0)
    [refused] = arrive(engine, arrived_at=4.005)
    assert refused is not None
    assert refused.message == "the first token is expected after 1.0 s, the target is 1 s"
    assert refused.retry_after_seconds == pytest.approx(0.0125, abs=0.005)
    assert codes(arrive(engine, arrived_at=4.1)) == [None]


def test_a_burst_beyond_the_places_of_an_idle_engine_is_refused() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    assert codes(arrive(engine, times=10)) == [None] * 4 + [RejectionCode.SHED] * 6


@pytest.mark.parametrize("max_running", [16, None])
def test_a_burst_on_an_idle_engine_is_judged_by_the_steps_of_a_full_batch(
    max_running: int | None,
) -> None:
    tenant = a_tenant(max_running=max_running, service=ServiceRule(ttft_seconds=3.0, sheds=True))
    slots = 64 if max_running else 16
    engine = a_simulation(a_snapshot(tenant), blocks=1000, max_num_seqs=slots, cost=DEAR_DECODES)
    assert codes(arrive(engine, times=60, output=15)) == [None] * 32 + [RejectionCode.SHED] * 28
    engine.drain()
    assert 2.0 < max(first_tokens(engine)) <= 3.0


def test_prompts_ahead_are_read_beside_the_decodes_of_those_before_them() -> None:
    tenant = a_tenant(service=ServiceRule(ttft_seconds=3.0, sheds=True))
    engine = a_simulation(
        a_snapshot(tenant), blocks=1000, max_batched_tokens=128, cost=DEAR_DECODES
    )
    assert RejectionCode.SHED in codes(arrive(engine, times=60, prompt=100))
    engine.drain()
    assert 2.0 < max(first_tokens(engine)) <= 3.0


def test_a_tenants_own_limit_makes_its_requests_wait_and_no_lower_tiers() -> None:
    bound = a_tenant(max_running=2, service=SHED_AFTER_1_S)
    spare = a_tenant("spare", tier="spare")
    tiers = {"standard": 0, "spare": -1}
    engine = an_engine(a_snapshot(bound, a_tenant("other"), spare, tiers=tiers))
    arrive(engine, "other", times=3, output=5)
    arrive(engine, output=80)
    engine.step()
    assert codes(arrive(engine, times=4, output=80)) == [None, None, *[RejectionCode.SHED] * 2]
    assert codes(arrive(engine, "spare")) == [None]


def test_without_the_wish_to_shed_everybody_queues() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=ServiceRule(ttft_seconds=1.0))))
    assert codes(arrive(engine, times=60)) == [None] * 60


def test_without_a_target_nobody_is_refused() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=ServiceRule(sheds=True))))
    assert codes(arrive(engine, times=60)) == [None] * 60


def test_who_wants_it_earlier_is_judged_by_that() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    assert codes(arrive(engine, ttft_seconds=0.0001)) == [RejectionCode.SHED]
    assert codes(arrive(engine)) == [None]


def test_who_would_wait_for_longer_is_judged_by_its_tenants_target_all_the_same() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    arrive(engine, times=4)
    engine.step()
    while arrive(engine)[0] is None:
        pass
    assert codes(arrive(engine, ttft_seconds=60.0)) == [RejectionCode.SHED]


def test_what_others_have_queued_counts_by_weight() -> None:
    light, heavy = (
        a_tenant("light", weight=1),
        a_tenant("heavy", weight=100, service=SHED_AFTER_1_S),
    )
    engine = an_engine(a_snapshot(light, heavy))
    arrive(engine, "light", times=4, output=8)
    engine.step()
    arrive(engine, "light", times=100, output=8)
    assert codes(arrive(engine, "heavy", output=8)) == [None]


def test_a_higher_tiers_queue_counts_whole() -> None:
    gold, other = a_tenant("gold", tier="gold"), a_tenant(service=SHED_AFTER_1_S)
    engine = an_engine(a_snapshot(gold, other, tiers={"gold": 10, "standard": 0}))
    arrive(engine, "gold", times=4)
    engine.step()
    arrive(engine, "gold", times=100)
    assert codes(arrive(engine)) == [RejectionCode.SHED]


def test_a_lower_tiers_work_makes_way() -> None:
    gold, other = a_tenant("gold", tier="gold", service=SHED_AFTER_1_S), a_tenant()
    engine = an_engine(a_snapshot(gold, other, tiers={"gold": 10, "standard": 0}))
    arrive(engine, times=4)
    engine.step()
    arrive(engine, times=100)
    assert codes(arrive(engine, "gold")) == [None]


def test_a_tenant_within_its_nominal_is_not_refused_while_others_borrow() -> None:
    owner = a_tenant("owner", kv_nominal_percent=50, service=SHED_AFTER_1_S)
    engine = an_engine(a_snapshot(owner, a_tenant("borrower")), blocks=100, slots=4)
    arrive(engine, "borrower", times=4, prompt=200, output=50)
    engine.step()
    assert codes(arrive(engine, "owner", prompt=200, ttft_seconds=0.001)) == [None]
    assert codes(arrive(engine, "owner", prompt=999, ttft_seconds=0.001)) == [RejectionCode.SHED]


@pytest.mark.parametrize(("waiting", "expected"), [(60, RejectionCode.SHED), (0, None)])
def test_tiers_below_zero_are_refused_while_others_miss(
    waiting: int, expected: RejectionCode | None
) -> None:
    spare, other = a_tenant("spare", tier="spare"), a_tenant(service=ServiceRule(ttft_seconds=1.0))
    engine = an_engine(a_snapshot(spare, other, tiers={"standard": 0, "spare": -1}))
    arrive(engine, times=4)
    engine.step()
    arrive(engine, times=waiting)
    assert codes(arrive(engine, "spare")) == [expected]


@pytest.mark.parametrize("lax_tier", ["standard", "high"])
def test_however_many_wait_within_their_targets_one_that_will_miss_is_seen(lax_tier: str) -> None:
    lax = [
        a_tenant(f"lax-{n}", tier=lax_tier, service=ServiceRule(ttft_seconds=3600.0 + n))
        for n in range(20)
    ]
    tight = a_tenant("tight", service=ServiceRule(ttft_seconds=1.0))
    tiers = {"high": 10, "standard": 0, "spare": -1}
    engine = an_engine(a_snapshot(*lax, tight, a_tenant("spare", tier="spare"), tiers=tiers))
    for tenant in lax:
        arrive(engine, tenant.tenant, times=90)
    arrive(engine, "tight", times=60)
    assert codes(arrive(engine, "spare")) == [RejectionCode.SHED]


def test_a_short_request_beside_a_long_one_is_not_taken_for_as_long() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)), blocks=200, slots=32)
    arrive(engine, prompt=2000, output=400, ttft_seconds=60.0)
    engine.step()
    assert codes(arrive(engine, times=4, output=10)) == [None] * 4


def test_who_is_in_a_hurry_does_not_wait_for_its_own_tenants_patient_requests() -> None:
    patient = ServiceRule(ttft_seconds=600.0, sheds=True)
    engine = an_engine(a_snapshot(a_tenant(service=patient)))
    arrive(engine, times=4, output=8)
    engine.step()
    arrive(engine, times=100, output=8)
    assert codes(arrive(engine, output=8, ttft_seconds=2.0)) == [None]
    assert codes(arrive(engine, output=8)) == [None]
    arrive(engine, times=100, output=8, ttft_seconds=2.0)
    assert codes(arrive(engine, output=8, ttft_seconds=2.0)) == [RejectionCode.SHED]


def told_to_wait(engine: Simulation, *, for_seconds: float) -> list[float]:
    """Keep an engine overloaded, and return what those refused are told, in order."""
    end, told = engine.clock.now() + for_seconds, []
    while engine.clock.now() < end:
        refused = arrive(engine, times=2, output=30)
        told += [r.retry_after_seconds for r in refused if r and r.retry_after_seconds]
        engine.run_until(engine.clock.now() + 0.1)
    return told


def test_the_longer_an_overload_has_lasted_the_later_are_clients_told_to_come_back() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    told = told_to_wait(engine, for_seconds=20)
    assert told[0] < 3
    assert told[len(told) // 2] > 10
    assert told[-1] > 30


def test_an_overload_is_over_once_arrivals_were_let_in_for_ten_seconds() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    told_to_wait(engine, for_seconds=20)
    for _ in range(12):
        engine.run_until(engine.clock.now() + 1.0)
        assert codes(arrive(engine, output=5)) == [None]
    assert told_to_wait(engine, for_seconds=5)[0] < 3


def test_who_was_let_in_for_less_long_is_still_told_of_the_same_overload() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    told_to_wait(engine, for_seconds=20)
    for _ in range(5):
        engine.run_until(engine.clock.now() + 1.0)
        assert codes(arrive(engine, output=5)) == [None]
    assert told_to_wait(engine, for_seconds=5)[0] > 30


def test_who_was_not_refused_for_a_minute_has_no_overload_any_more() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=SHED_AFTER_1_S)))
    told_to_wait(engine, for_seconds=20)
    engine.run_until(engine.clock.now() + 61.0)
    assert told_to_wait(engine, for_seconds=5)[0] < 3


def test_what_a_higher_tier_goes_on_sending_delays_a_lower_one() -> None:
    gold = a_tenant("gold", tier="gold")
    silver = a_tenant("silver", service=ServiceRule(ttft_seconds=3.0, sheds=True))
    engine = an_engine(a_snapshot(gold, silver, tiers={"gold": 10, "standard": 0}), slots=8)
    for _ in range(150):
        # Gold alone keeps about four of the eight places.
        arrive(engine, "gold", times=2, prompt=100, output=30)
        arrive(engine, "silver", times=2, prompt=100, output=50)
        engine.run_until(engine.clock.now() + 0.2)
    let_in = [
        trace
        for trace in engine.log.requests.values()
        if trace.tenant == "silver" and trace.rejection is None and trace.arrived_at < 26.0
    ]
    in_time = [t for t in let_in if t.ttft_seconds is not None and t.ttft_seconds <= 3.5]
    assert len(let_in) > 100
    assert len(in_time) >= 0.95 * len(let_in)


def test_a_tier_is_let_in_for_its_reserved_share_beside_a_flooded_higher_one() -> None:
    tiers = {
        "gold": TierRule(name="gold", value=10),
        "standard": TierRule(name="standard", value=0, reserved_share_percent=20),
    }
    gold = a_tenant("gold", tier="gold")
    batch = a_tenant("batch", service=ServiceRule(ttft_seconds=4.0, sheds=True))
    engine = an_engine(a_snapshot(gold, batch, tiers=tiers), slots=8)
    for _ in range(200):
        arrive(engine, "gold", times=6, prompt=100, output=30)
        arrive(engine, "batch", times=2, prompt=100, output=30)
        engine.run_until(engine.clock.now() + 0.2)
    served = engine.scheduler.stats().tenants
    share = served["batch"].service / (served["batch"].service + served["gold"].service)
    assert share == pytest.approx(0.2, abs=0.03)
