"""Inter-token latency targets bound the batch: who joins it, and who is in a step."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count, pairwise

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Reason, Verdict
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import Request
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import ServiceRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, a_prompt, a_simulation

COSTS = ExecutorCosts(step_seconds=0.002, prefill_token_seconds=0.0001, decode_seconds=0.01)
TARGET = 0.05
FITTING = 3
"""Decodes of 10 ms in a step of 2 ms that leave a margin of a fifth of the target."""

TIMED = ServiceRule(itl_seconds=TARGET)
_numbers = count(1)


def an_engine(policy: PolicySnapshot, costs: ExecutorCosts = COSTS) -> Simulation:
    return a_simulation(policy, blocks=4000, max_num_seqs=64, cost=AffineCost(costs))


def requests(tenant: str, times: int, *, output: int = 40) -> list[Request]:
    return [
        a_request(tenant, prompt=a_prompt(next(_numbers), 20), output=output) for _ in range(times)
    ]


def two_tiers(**low: object) -> PolicySnapshot:
    return a_snapshot(
        a_tenant("gold", tier="gold", service=TIMED),
        a_tenant("low", tier="low", **low),
        tiers={"gold": 10, "low": 0},
    )


def rows_of(plan: StepPlan, asked: Iterable[Request]) -> int:
    names = {request.request_id for request in asked}
    return sum(row.request_id in names for row in plan.rows)


def gaps_of(engine: Simulation, request: Request) -> list[float]:
    return [b - a for a, b in pairwise(engine.log.requests[request.request_id].token_times)]


def is_running(engine: Simulation, request: Request) -> bool:
    return not engine.log.requests[request.request_id].is_finished


def held_for_targets(engine: Simulation) -> set[str]:
    return {
        decision.tenant
        for plan in engine.plans
        for decision in plan.decisions
        if (decision.verdict, decision.reason) == (Verdict.HELD, Reason.ITL_TARGET)
    }


def test_no_more_run_than_their_own_target_allows() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=TIMED)))
    asked = requests("acme", 30)
    engine.accept(*asked)
    engine.drain()
    assert max(len(plan.rows) for plan in engine.plans) == FITTING
    assert max(gap for request in asked for gap in gaps_of(engine, request)) <= TARGET
    assert held_for_targets(engine) == {"acme"}


def test_lower_tiers_come_in_as_far_as_a_higher_ones_target_allows() -> None:
    engine = an_engine(two_tiers())
    gold, low = requests("gold", 1, output=100), requests("low", 29)
    engine.accept(*gold)
    engine.step()
    engine.accept(*low)
    while is_running(engine, gold[0]):
        engine.step()
    assert max(len(plan.rows) for plan in engine.plans) == FITTING
    assert max(gaps_of(engine, gold[0])) <= TARGET
    assert held_for_targets(engine) == {"low"}
    engine.drain()
    assert max(len(plan.rows) for plan in engine.plans) > FITTING


def test_who_runs_already_takes_turns_beside_a_higher_one() -> None:
    engine = an_engine(two_tiers())
    low = requests("low", 8, output=200)
    engine.accept(*low)
    engine.steps(20)
    gold = requests("gold", 1, output=90)
    engine.accept(*gold)
    before = [len(engine.output(request.request_id)) for request in low]
    while is_running(engine, gold[0]):
        engine.step()
    assert max(gaps_of(engine, gold[0])) <= TARGET
    assert engine.preempted() == []
    gained = [
        len(engine.output(request.request_id)) - n for request, n in zip(low, before, strict=True)
    ]
    # Two of eight beside gold in each step, and nobody twice before all others.
    assert max(gained) - min(gained) <= 2
    assert sum(gained) >= 2 * 85
    stood = sum(len(low) - rows_of(plan, low) for plan in engine.plans[20:])
    assert engine.scheduler.stats().tenants["low"].deferred_decodes == stood


def test_each_lower_tier_goes_on_however_tight_the_target_is() -> None:
    policy = a_snapshot(
        a_tenant("gold", tier="gold", service=TIMED),
        a_tenant("silver", tier="silver"),
        a_tenant("low", tier="low"),
        tiers={"gold": 20, "silver": 10, "low": 0},
    )
    engine = an_engine(policy)
    others = {name: requests(name, 3, output=200) for name in ("silver", "low")}
    engine.accept(*others["silver"], *others["low"])
    engine.steps(10)
    gold = requests("gold", 3, output=60)
    engine.accept(*gold)
    engine.steps(10)
    for plan in engine.steps(20):
        assert rows_of(plan, gold) == 3
        assert [rows_of(plan, asked) for asked in others.values()] == [1, 1]


def test_who_has_a_target_is_not_kept_out_by_those_who_run() -> None:
    policy = a_snapshot(a_tenant("timed", service=TIMED), a_tenant("other"))
    engine = an_engine(policy)
    engine.accept(*requests("other", 20, output=60))
    engine.steps(5)
    timed = requests("timed", 1, output=200)
    engine.accept(*timed)
    engine.accept(*requests("other", 20, output=60))
    assert timed[0].request_id in engine.step().admitted
    engine.drain()
    # Whom it found there end; of those behind it no more come in than it allows.
    late = gaps_of(engine, timed[0])[80:]
    assert late
    assert max(late) <= TARGET
    assert held_for_targets(engine) == {"other"}


def test_context_that_grows_leaves_less_room() -> None:
    engine = an_engine(two_tiers(), replace(COSTS, context_token_seconds=0.0001))
    gold = requests("gold", 1, output=300)
    engine.accept(*gold)
    engine.steps(5)
    long = a_request("low", prompt=a_prompt(next(_numbers), 200), output=40)
    engine.accept(long)
    assert engine.step().admitted == ()
    engine.cancel(long.request_id)
    engine.steps(150)
    short = requests("low", 1)
    engine.accept(*short)
    # Beside gold's first tokens it would have fitted.
    assert engine.step().admitted == ()
    engine.drain()
    assert max(gaps_of(engine, gold[0])) <= TARGET


def test_a_target_that_no_step_meets_bounds_nothing() -> None:
    engine = an_engine(a_snapshot(a_tenant(service=ServiceRule(itl_seconds=0.005))))
    engine.accept(*requests("acme", 20))
    engine.drain()
    assert max(len(plan.rows) for plan in engine.plans) == 20


def test_a_floor_holds_beside_a_target() -> None:
    low = TierRule(name="low", value=0, reserved_share_percent=30)
    policy = a_snapshot(
        a_tenant("gold", tier="gold", service=TIMED),
        a_tenant("low", tier="low"),
        tiers={"gold": 10, "low": low},
    )
    engine = an_engine(policy)
    gold, asked = requests("gold", 60), requests("low", 60)
    engine.accept(*gold, *asked)
    while len(engine.plans) < 400:
        engine.step()
    rows = [rows_of(plan, asked) for plan in engine.plans]
    assert sum(rows) >= 0.25 * sum(len(plan.rows) for plan in engine.plans)


def test_the_wait_for_a_place_within_the_target_is_foreseen() -> None:
    rule = ServiceRule(itl_seconds=TARGET, ttft_seconds=1.0, sheds=True)
    engine = an_engine(a_snapshot(a_tenant(service=rule)))
    refused = [engine.submit(one) is not None for one in requests("acme", FITTING)]
    engine.step()
    refused += [engine.submit(one) is not None for one in requests("acme", 10)]
    assert refused == [False] * FITTING + [True] * 10


@pytest.mark.parametrize("target", [0.03, 0.07])
def test_a_changed_target_bounds_the_next_step(target: float) -> None:
    engine = an_engine(two_tiers())
    engine.accept(*requests("low", 8, output=200))
    engine.steps(10)
    engine.accept(*requests("gold", 1, output=200))
    engine.steps(10)
    assert len(engine.step().rows) == FITTING
    changed = a_tenant("gold", tier="gold", service=ServiceRule(itl_seconds=target))
    engine.obey(a_snapshot(changed, a_tenant("low", tier="low"), tiers={"gold": 10, "low": 0}))
    assert len(engine.step().rows) == {0.03: 2, 0.07: 5}[target]
