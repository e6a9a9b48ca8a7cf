"""Nominal KV blocks are their owner's: lent while unused, back when wanted, nobody else's ever."""

from itertools import pairwise

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Reason
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import (
    KvEstimate,
    PreemptionMode,
    PreemptionRule,
    ServiceRule,
    WatermarkRule,
)
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_prompt, a_simulation, output_alone

BLOCKS = 100
QUANTUM = 16
TIERS = {"high": 10, "middle": 0, "low": -10}
WIDE = WatermarkRule(low_percent=98, high_percent=99)  # watermarks out of the way


def runs_in(plan: StepPlan, request_id: str) -> bool:
    return any(row.request_id == request_id for row in plan.rows)


def borrow_everything(engine: Simulation) -> None:
    """Let the borrower fill the pool, and its requests produce more than their quantum."""
    names = [f"b{number}" for number in range(8)]
    for number, name in enumerate(names):
        prompt = a_prompt(number, 10 * BLOCK_SIZE)
        engine.accept(a_request("borrower", prompt=prompt, output=400, request_id=name))
    engine.steps(QUANTUM + 2)
    assert engine.used_blocks("borrower") == 96
    assert all(len(engine.output(name)) > QUANTUM for name in names)
    assert not engine.preempted()


@pytest.mark.parametrize("borrower_tier", TIERS)
@pytest.mark.parametrize("estimate", [KvEstimate.PREDICTED, KvEstimate.OPTIMISTIC])
def test_an_owner_gets_its_borrowed_blocks_back_within_two_steps_whatever_the_borrowers_tier(
    borrower_tier: str, estimate: KvEstimate
) -> None:
    rule = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=QUANTUM)
    policy = a_snapshot(
        a_tenant("owner", tier="middle", kv_nominal_percent=50),
        a_tenant("borrower", tier=borrower_tier, preemption=rule),
        tiers=TIERS,
        watermarks=WIDE,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    engine = a_simulation(policy, blocks=BLOCKS)
    borrow_everything(engine)
    if estimate is KvEstimate.PREDICTED:
        engine.obey(a_snapshot(*policy.tenants, tiers=TIERS, watermarks=WIDE, kv_estimate=estimate))
    owners = a_request("owner", prompt=a_prompt(50, 48 * BLOCK_SIZE), output=32, request_id="own")
    engine.accept(owners)
    assert any(runs_in(plan, "own") for plan in engine.steps(2))
    assert engine.used_blocks("owner") >= 48
    assert {d.reason for d in engine.preempted()} == {Reason.RECLAIMED}
    assert {d.beneficiary for d in engine.preempted()} == {"own"}
    engine.drain()
    assert engine.output("own") == output_alone(owners, blocks=BLOCKS, policy=policy)


def test_blocks_that_are_copied_to_the_host_are_the_owners_two_steps_after_the_copy() -> None:
    rule = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=QUANTUM)
    policy = a_snapshot(
        a_tenant("owner", kv_nominal_percent=50),
        a_tenant("borrower", preemption=rule),
        watermarks=WIDE,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    cost = AffineCost(ExecutorCosts(swap_block_seconds=0.005))  # a victim's copy takes some steps
    engine = a_simulation(policy, blocks=BLOCKS, host_blocks=BLOCKS, cost=cost)
    borrow_everything(engine)
    owners = a_request("owner", prompt=a_prompt(50, 48 * BLOCK_SIZE), output=32, request_id="own")
    engine.accept(owners)
    engine.step()
    assert {swap.request_id for swap in engine.executor.copying.values()} >= set(
        engine.plans[-1].preempted
    )
    while engine.executor.copying:
        assert not runs_in(engine.plans[-1], "own")
        engine.step()
    assert any(runs_in(plan, "own") for plan in engine.steps(2))
    own = [decision for decision in engine.preempted() if decision.beneficiary == "own"]
    assert {decision.reason for decision in own} == {Reason.RECLAIMED}
    engine.drain()
    assert engine.output("own") == output_alone(owners, blocks=BLOCKS, policy=policy)


def test_a_place_is_taken_by_tier_and_blocks_are_reclaimed_where_both_are_lacking() -> None:
    rule = PreemptionRule(mode=PreemptionMode.RECOMPUTE, min_quantum_tokens=0)
    policy = a_snapshot(
        a_tenant("owner", tier="middle", kv_nominal_percent=20),
        a_tenant("lowly", tier="low", kv_nominal_percent=50, preemption=rule),
        a_tenant("borrower", tier="high", preemption=rule),
        tiers=TIERS,
        watermarks=WIDE,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    engine = a_simulation(policy, blocks=BLOCKS, max_num_seqs=2)
    engine.arrive("within", tenant="lowly", blocks=BLOCKS // 2 - 4, output=40)
    engine.arrive("beyond", tenant="borrower", blocks=BLOCKS // 2 - 4, output=400)
    engine.steps(4)
    engine.arrive("own", tenant="owner", blocks=BLOCKS // 5 - 2, output=20)

    assert any(runs_in(plan, "own") for plan in engine.steps(2))
    reasons = {decision.request_id: decision.reason for decision in engine.preempted()}
    assert reasons == {"within": Reason.DISPLACED, "beyond": Reason.RECLAIMED}


@pytest.mark.parametrize("taker_tier", TIERS)
def test_nobody_of_any_tier_takes_nominal_blocks(taker_tier: str) -> None:
    rule = PreemptionRule(min_quantum_tokens=0)
    never_stands_back = ServiceRule(itl_seconds=0.02)
    policy = a_snapshot(
        a_tenant(
            "owner",
            tier="middle",
            kv_nominal_percent=50,
            preemption=rule,
            service=never_stands_back,
        ),
        a_tenant("taker", tier=taker_tier, kv_nominal_percent=10, preemption=rule),
        tiers=TIERS,
        watermarks=WIDE,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    engine = a_simulation(policy, blocks=BLOCKS)
    owners = [f"own{number}" for number in range(5)]
    for number, name in enumerate(owners):
        prompt = a_prompt(number, 2 * BLOCK_SIZE)
        engine.accept(a_request("owner", prompt=prompt, output=8 * BLOCK_SIZE, request_id=name))
    engine.step()
    for number in range(100, 120):
        engine.accept(a_request("taker", prompt=a_prompt(number, 20), output=400))
    used = [engine.used_blocks("owner")]
    while not engine.log.requests[owners[-1]].is_finished:
        plan = engine.step()
        assert all(runs_in(plan, name) for name in owners)
        used.append(engine.used_blocks("owner"))
    assert max(used) == 50
    assert all(after >= before for before, after in pairwise(used[:-1]))
    takers = [decision.tenant for decision in engine.preempted()]
    assert takers, "memory never ran short"
    assert {*takers} == {"taker"}


LENDABLE = pytest.mark.parametrize("lendable_percent", [0, 50, 100])


@LENDABLE
def test_a_request_alone_borrows_what_is_lendable_and_not_more(lendable_percent: int) -> None:
    engine = a_simulation(
        a_snapshot(
            a_tenant("owner", kv_nominal_percent=60, kv_lendable_percent=lendable_percent),
            a_tenant("guest"),
            watermarks=WIDE,
        ),
        blocks=BLOCKS,
    )
    engine.accept(a_request("guest", prompt=4, output=2000, request_id="g"))
    most = 0
    while engine.scheduler.has_work:
        engine.step()
        most = max(most, engine.used_blocks("guest"))
    assert most == 40 + 60 * lendable_percent // 100
    assert 4 + len(engine.output("g")) == most * BLOCK_SIZE + 1


@LENDABLE
@pytest.mark.parametrize("own_blocks", [0, 20, 60])
def test_an_unused_nominal_is_lent_up_to_its_lendable_part_and_not_beyond(
    own_blocks: int, lendable_percent: int
) -> None:
    engine = a_simulation(
        a_snapshot(
            a_tenant("owner", kv_nominal_percent=60, kv_lendable_percent=lendable_percent),
            a_tenant("guest"),
            a_tenant("other"),
            watermarks=WIDE,
            kv_estimate=KvEstimate.OPTIMISTIC,
        ),
        blocks=BLOCKS,
    )
    if own_blocks:
        prompt = a_prompt(0, (own_blocks - 1) * BLOCK_SIZE)
        engine.accept(a_request("owner", prompt=prompt, output=BLOCK_SIZE + 1))
        engine.steps(2)
        assert engine.used_blocks("owner") == own_blocks
    for number in range(1, 41):
        guest = ("guest", "other")[number % 2]
        engine.accept(a_request(guest, prompt=a_prompt(number, 30), output=200))
    lendable = (60 - own_blocks) * lendable_percent // 100
    most = 0
    for _ in range(BLOCK_SIZE - 2 if own_blocks else 500):
        engine.step()
        borrowed = engine.used_blocks("guest") + engine.used_blocks("other")
        assert borrowed <= 40 + lendable
        most = max(most, borrowed)
    # Requests grow by whole blocks, and the high watermark, at 99 blocks, takes the last back.
    assert most >= min(40 + lendable, 99 - own_blocks) - 2


def alternate_bursts(
    mode: PreemptionMode, *, requests: int, prompt: int, output: int, period: float
) -> Simulation:
    """Let two tenants of 40 blocks each send so many requests in turn, every few seconds."""
    names = ("a", "b")
    rule = PreemptionRule(mode=mode)
    engine = a_simulation(
        a_snapshot(*(a_tenant(name, kv_nominal_percent=40, preemption=rule) for name in names)),
        blocks=BLOCKS,
        host_blocks=BLOCKS,
        check_every=20,
    )
    for burst in range(20):
        for number in range(requests):
            tokens = a_prompt(burst * 10 + number, prompt)
            engine.accept(a_request(names[burst % 2], prompt=tokens, output=output))
        engine.run_until((burst + 1) * period)
    return engine


MODES = pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])


@MODES
@pytest.mark.parametrize("period", [1.0, 1.5, 2.5])
def test_bursts_at_nominal_preempt_nobody(mode: PreemptionMode, period: float) -> None:
    engine = alternate_bursts(mode, requests=4, prompt=32, output=128, period=period)
    assert not engine.preempted()


@MODES
@pytest.mark.parametrize(
    ("requests", "prompt", "output", "period"),
    [
        pytest.param(8, 32, 128, 1.8, id="twice nominal"),
        pytest.param(8, 96, 64, 0.8, id="twice nominal, long prompts"),
        pytest.param(12, 32, 128, 2.0, id="three times nominal"),
        pytest.param(4, 320, 320, 4.0, id="four times nominal"),
    ],
)
def test_alternating_bursts_are_no_ping_pong(
    mode: PreemptionMode, requests: int, prompt: int, output: int, period: float
) -> None:
    engine = alternate_bursts(mode, requests=requests, prompt=prompt, output=output, period=period)
    assert len(engine.preempted()) <= engine.log.output_tokens / 200
    if prompt == 320:
        assert Reason.RECLAIMED in {decision.reason for decision in engine.preempted()}


def test_what_is_taken_back_while_copies_leave_counts_as_reclaimed() -> None:
    swaps = PreemptionRule(mode=PreemptionMode.SWAP, min_quantum_tokens=0)
    policy = a_snapshot(
        a_tenant("owner", tier="middle", kv_nominal_percent=40),
        # Once its copy has left, one block that it owns is kept from the others.
        a_tenant(
            "leaver", tier="low", kv_nominal_percent=5, kv_lendable_percent=50, preemption=swaps
        ),
        a_tenant("borrower", tier="high", preemption=swaps),
        tiers=TIERS,
        watermarks=WIDE,
        kv_estimate=KvEstimate.OPTIMISTIC,
    )
    slow = AffineCost(ExecutorCosts(swap_block_seconds=0.1))
    engine = a_simulation(policy, blocks=24, host_blocks=24, cost=slow)
    engine.arrive("old", tenant="borrower", blocks=8)
    engine.arrive("new", tenant="borrower", blocks=7)
    engine.arrive("leaving", tenant="leaver", blocks=7)
    engine.steps(2)
    engine.arrive("first", tenant="owner", blocks=5, output=4)
    engine.step()
    assert [d.request_id for d in engine.preempted()] == ["leaving"]
    engine.cancel("first")
    engine.arrive("second", tenant="owner", blocks=9, output=4)
    engine.step()

    assert [(d.tenant, d.reason) for d in engine.preempted()] == [
        ("leaver", Reason.RECLAIMED),
        ("borrower", Reason.RECLAIMED),
    ]
