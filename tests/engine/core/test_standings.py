"""What a request is told about its wait is what happens to it then."""

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.sequence import Phase
from tidegate_engine.core.standings import Standing, Wait
from tidegate_engine.core.static_batching import StaticScheduler
from tidegate_policies.rules import (
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    StopPolicy,
    TenantRule,
)
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_simulation, admitting_by_present_need

BLOCKS = 40
EAGER = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)


def standing(engine: Simulation, name: str) -> Standing:
    (found,) = engine.scheduler.standings.of([name], engine.clock.now())
    return found


def crowded(*tenants: TenantRule, max_num_seqs: int = 1) -> Simulation:
    return a_simulation(
        admitting_by_present_need(*tenants), blocks=BLOCKS, max_num_seqs=max_num_seqs
    )


def test_who_runs_waits_for_nothing_and_who_is_unknown_stands_nowhere() -> None:
    engine = crowded(a_tenant())
    engine.arrive("runs")
    engine.step()
    found = standing(engine, "runs")
    assert (found.phase, found.position, found.waits_for) == (Phase.RUNNING, None, None)
    assert engine.scheduler.standings.of(["unheard-of"], 0.0) == ()


def test_with_a_full_batch_a_request_waits_for_a_slot_behind_its_tenants_earlier_ones() -> None:
    engine = crowded(a_tenant(), a_tenant("other"))
    engine.arrive("runs")
    engine.step()
    queued_at = engine.clock.now()
    engine.arrive("first", "second", "third")
    engine.arrive("others", tenant="other")
    engine.step()
    first, third = standing(engine, "first"), standing(engine, "third")
    assert (first.position, third.position) == (1, 3)
    assert (first.waits_for, first.queued_at) == (Wait.SLOT, queued_at)
    assert third.waits_for is Wait.TURN
    assert standing(engine, "others").position == 1


def test_the_line_is_the_order_in_which_requests_are_served() -> None:
    engine = crowded(a_tenant(service=ServiceRule()))
    engine.arrive("runs", output=2)
    engine.step()
    engine.arrive("late", "later", output=2)
    engine.accept(a_request(request_id="urgent", ttft_seconds=20.0, output=2))
    engine.accept(a_request(request_id="most-urgent", ttft_seconds=10.0, output=2))
    line = engine.scheduler.standings.line("acme", engine.clock.now(), most=10)
    told = [one.request_id for one in line.first]
    engine.drain()
    assert line.length == 4
    assert told == [name for plan in engine.plans for name in plan.admitted if name != "runs"]
    assert told[:2] == ["most-urgent", "urgent"]


def test_what_a_tenants_own_limit_holds_back_waits_for_its_quota() -> None:
    engine = crowded(a_tenant(max_running=1), max_num_seqs=8)
    engine.arrive("runs", "waits")
    engine.steps(2)
    assert standing(engine, "waits").waits_for is Wait.QUOTA


def test_what_memory_has_no_room_for_waits_for_kv() -> None:
    engine = crowded(a_tenant(), a_tenant("other"), max_num_seqs=8)
    engine.arrive("runs", blocks=30, tenant="other")
    engine.step()
    engine.arrive("large", blocks=20)
    engine.step()
    found = standing(engine, "large")
    assert found.waits_for is Wait.KV
    assert found.reason in {Reason.NO_BLOCKS, Reason.PREDICTED_PEAK, Reason.WATERMARK}


def test_behind_a_higher_tier_a_request_waits_for_that() -> None:
    engine = crowded(a_tenant("gold", tier="high"), a_tenant(tier="low", preemption=EAGER))
    engine.arrive("runs", tenant="gold")
    engine.step()
    engine.arrive("golden", tenant="gold")
    engine.arrive("waits")
    assert standing(engine, "waits").waits_for is Wait.TIER
    assert standing(engine, "golden").waits_for is not Wait.TIER


def test_a_held_tenants_request_waits_for_the_end_of_the_hold() -> None:
    engine = crowded(a_tenant(stop=StopPolicy.HOLD))
    engine.arrive("waits")
    engine.step()
    assert standing(engine, "waits").waits_for is Wait.HOLD


def test_who_was_taken_out_stands_before_those_who_never_began_and_expects_no_first_token() -> None:
    engine = crowded(a_tenant("gold", tier="high"), a_tenant(preemption=EAGER))
    engine.arrive("victim", blocks=2)
    engine.steps(3)
    engine.arrive("later")
    engine.arrive("golden", tenant="gold")
    engine.step()
    victim, later = standing(engine, "victim"), standing(engine, "later")
    assert (victim.phase, victim.position, victim.preemptions) == (Phase.WAITING, 1, 1)
    assert (later.position, later.preemptions) == (2, 0)
    assert victim.first_token_seconds is None


def test_once_it_has_a_place_a_swapped_request_stands_in_no_line_and_waits_for_its_kv() -> None:
    swapping = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    engine = a_simulation(
        admitting_by_present_need(a_tenant("gold", tier="high"), a_tenant(preemption=swapping)),
        blocks=BLOCKS,
        host_blocks=BLOCKS,
        max_num_seqs=1,
    )
    engine.arrive("victim", blocks=8)
    engine.steps(3)
    engine.arrive("golden", tenant="gold", output=2)
    engine.step()
    seen = []
    while (found := standing(engine, "victim")).phase is not Phase.RUNNING:
        assert found.phase is Phase.SWAPPED
        seen.append((found.position, found.waits_for))
        engine.step()
    assert seen[0][0] == 1
    assert seen[-1] == (None, Wait.KV)


def test_the_predicted_first_token_comes_about_then() -> None:
    engine = a_simulation(
        a_snapshot(a_tenant()),
        blocks=4000,
        max_num_seqs=4,
    )
    names = [f"r{number}" for number in range(60)]
    engine.arrive(*names[:20], output=50)
    engine.steps(200)  # lengths and step times are known from these
    engine.arrive(*names[20:], output=50)
    engine.step()
    now = engine.clock.now()
    line = engine.scheduler.standings.line("acme", now, most=100)
    told = {one.request_id: one.first_token_seconds for one in line.first}
    engine.drain()
    for name, seconds in told.items():
        assert seconds is not None
        truly = engine.log.requests[name].token_times[0] - now
        assert seconds == pytest.approx(truly, rel=0.5, abs=0.6), name
    assert list(told.values()) == sorted(told.values(), key=lambda seconds: seconds or 0.0)


def test_a_line_shows_no_more_than_is_asked_for_and_tells_how_long_it_is() -> None:
    engine = crowded(a_tenant())
    engine.arrive(*(f"r{number}" for number in range(30)))
    line = engine.scheduler.standings.line("acme", 0.0, most=10)
    assert (line.length, len(line.first)) == (30, 10)
    assert engine.scheduler.standings.line("nobody", 0.0, most=10).length == 0


def test_in_static_batching_all_wait_for_a_place_in_the_next_batch() -> None:
    scheduler = StaticScheduler(
        num_blocks=100,
        block_size=16,
        limits=EngineLimits(max_num_seqs=1),
        costs=ExecutorCosts(),
    )
    scheduler.apply_policy(a_snapshot(a_tenant()), 1)
    scheduler.plan_step(0.0)
    for name in ("runs", "first", "second"):
        scheduler.submit(a_request(request_id=name), 1.0)
    scheduler.plan_step(1.0)
    found = scheduler.standings.of(["runs", "second"], 2.0)
    assert [(one.request_id, one.phase, one.position) for one in found] == [
        ("runs", Phase.RUNNING, None),
        ("second", Phase.WAITING, 2),
    ]
    line = scheduler.standings.line("acme", 2.0, most=1)
    assert (line.length, line.first[0].waits_for) == (2, Wait.SLOT)
    assert scheduler.standings.cached_tokens(a_request()) == 0


@pytest.mark.parametrize(
    ("tenant", "changed_at", "cached"),
    [("acme", None, 47), ("acme", 20, 16), ("acme", 0, 0), ("other", None, 0)],
)
def test_what_a_request_is_said_to_find_of_its_prompt_is_what_it_finds(
    tenant: str, changed_at: int | None, cached: int
) -> None:
    engine = crowded(a_tenant(), a_tenant("other"))
    prompt = list(range(48))
    engine.accept(a_request(prompt=tuple(prompt)))
    engine.drain()
    if changed_at is not None:
        prompt[changed_at] = 99
    request = a_request(tenant, prompt=tuple(prompt))
    told = engine.scheduler.standings.cached_tokens(request)
    engine.accept(request)
    engine.drain()
    found = {name: tokens for plan in engine.plans for name, tokens in plan.cached}
    assert told == found.get(request.request_id, 0) == cached


def test_who_is_not_let_in_is_said_to_find_nothing() -> None:
    engine = crowded(a_tenant())
    engine.accept(a_request(prompt=40))
    engine.drain()
    for stranger in (a_request("unheard-of", prompt=40), a_request(prompt=())):
        assert engine.scheduler.standings.cached_tokens(stranger) == 0
