"""Lower tiers leave a step to the prompts of a higher one, where that is worth its price."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.precedence import UNTARGETED_ITL_SECONDS
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.rules import ServiceRule, TierRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import VOCAB_SIZE, a_request, a_scheduler

FIXED = 0.010
DEAR = ExecutorCosts(step_seconds=FIXED, prefill_token_seconds=0.001, decode_seconds=0.008)
"""Four decodes take three times as long as a step does whatever it computes."""
CHEAP = ExecutorCosts(step_seconds=FIXED, prefill_token_seconds=0.001, decode_seconds=0.002)
"""Four decodes take less than a step does whatever it computes."""

LOW = ("low0", "low1", "low2", "low3")


def a_policy(
    *, itl: float | None = None, preempts_lower: bool = True, low_tier: str = "bronze"
) -> PolicySnapshot:
    return a_snapshot(
        a_tenant("gold", tier="gold"),
        a_tenant("low", tier=low_tier, service=ServiceRule(itl_seconds=itl)),
        tiers={"gold": TierRule(name="gold", value=10, preempts_lower=preempts_lower), "bronze": 0},
    )


@dataclass
class Timed:
    """A scheduler whose steps take as long as their costs say."""

    scheduler: Scheduler
    executor: Executor
    clock: VirtualClock
    output: dict[str, list[float]] = field(default_factory=dict)
    arrivals: int = 0

    def submit(self, tenant: str, name: str, *, prompt: int = 4, output: int = 30) -> None:
        self.arrivals += 1  # so that no prompt has a prefix in common with another
        tokens = (self.arrivals % VOCAB_SIZE,) * prompt
        request = a_request(tenant, request_id=name, prompt=tokens, output=output)
        assert self.scheduler.submit(request, self.clock.now()) is None

    def step(self) -> StepPlan:
        plan = self.scheduler.plan_step(self.clock.now())
        if plan.rows:
            result = self.executor.execute(plan)
            for output in self.scheduler.commit_step(plan, result, self.clock.now()):
                self.output.setdefault(output.request_id, []).append(self.clock.now())
        self.scheduler.check_invariants()
        return plan


def a_busy_engine(
    policy: PolicySnapshot, costs: ExecutorCosts, *, output: int = 30, **sizes: int
) -> Timed:
    """Return an engine in which four low requests decode."""
    clock = VirtualClock()
    executor = SimulatedExecutor(
        capacity=Capacity(num_blocks=200, num_host_blocks=0, block_size=4),
        vocab_size=VOCAB_SIZE,
        cost=AffineCost(costs),
        clock=clock,
    )
    scheduler = a_scheduler(policy, costs=costs, blocks=200, **sizes)
    timed = Timed(scheduler, executor, clock)
    for name in LOW:
        timed.submit("low", name, output=output)
    timed.step()
    return timed


def rows(plan: StepPlan) -> list[str]:
    return [row.request_id for row in plan.rows]


def test_lower_decodes_stand_back_where_they_cost_a_prompt_more_than_a_step_does() -> None:
    engine = a_busy_engine(a_policy(), DEAR)
    engine.submit("gold", "high", prompt=16)
    assert rows(engine.step()) == ["high"]
    assert rows(engine.step()) == [*LOW, "high"]


def test_they_share_its_step_where_they_cost_it_less() -> None:
    engine = a_busy_engine(a_policy(), CHEAP)
    engine.submit("gold", "high", prompt=16)
    assert rows(engine.step()) == [*LOW, "high"]


@pytest.mark.parametrize(("prompt", "reading"), [(4, 4), (32, 2)], ids=["read", "queued"])
def test_what_they_cost_counts_for_each_prompt_that_waits(prompt: int, reading: int) -> None:
    engine = a_busy_engine(a_policy(), CHEAP, max_batched_tokens=24)
    for number in range(4):
        engine.submit("gold", f"high{number}", prompt=prompt)
    assert len(rows(engine.step())) == reading


def test_too_few_of_them_share_their_step() -> None:
    engine = a_busy_engine(a_policy(), CHEAP, max_batched_tokens=24)
    for number in range(2):
        engine.submit("gold", f"high{number}", prompt=32)
    assert set(LOW) < set(rows(engine.step()))


def test_a_lower_prompt_stands_back_with_the_decodes() -> None:
    engine = a_busy_engine(a_policy(), DEAR)
    engine.submit("low", "late", prompt=16)
    engine.submit("gold", "high", prompt=16)
    assert rows(engine.step()) == ["high"]
    assert "late" in rows(engine.step())


def test_the_higher_prompt_gets_the_tokens_that_the_decodes_leave() -> None:
    engine = a_busy_engine(a_policy(), DEAR, max_batched_tokens=12)
    engine.submit("gold", "high", prompt=16)
    [row] = engine.step().rows
    assert len(row.token_ids) == 12


def test_decodes_of_the_higher_tier_go_on() -> None:
    engine = a_busy_engine(a_policy(), DEAR)
    engine.submit("gold", "first")
    engine.step()
    engine.submit("gold", "second", prompt=16)
    assert rows(engine.step()) == ["first", "second"]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(a_policy(low_tier="gold"), id="of-the-same-tier"),
        pytest.param(a_policy(preempts_lower=False), id="of-a-tier-that-takes-nothing-from-others"),
    ],
)
def test_nobody_stands_back_for_a_prompt(policy: PolicySnapshot) -> None:
    engine = a_busy_engine(policy, DEAR)
    engine.submit("gold", "high", prompt=16)
    assert set(LOW) < set(rows(engine.step()))


@pytest.mark.parametrize("itl", [None, 0.25, 0.5])
def test_they_stand_back_no_longer_than_their_target_of_the_time_between_two_tokens(
    itl: float | None,
) -> None:
    engine = a_busy_engine(
        a_policy(itl=itl), DEAR, output=100, max_batched_tokens=24, max_num_seqs=64
    )
    for number in range(60):
        engine.submit("gold", f"high{number}", prompt=24, output=1)
    alone = 0
    while len(engine.output.get("high59", [])) < 1:
        alone += not set(LOW) & set(rows(engine.step()))
    assert alone > 5
    for name in LOW:
        times = engine.output[name]
        gaps = [after - before for before, after in pairwise(times)]
        longest = itl or UNTARGETED_ITL_SECONDS
        assert 0.5 * longest < max(gaps) <= longest


def test_a_target_that_a_shared_step_takes_up_is_not_put_off() -> None:
    engine = a_busy_engine(a_policy(itl=0.06), DEAR)
    engine.submit("gold", "high", prompt=16)
    assert set(LOW) < set(rows(engine.step()))


def test_who_stood_back_is_charged_for_what_it_got_and_loses_no_token() -> None:
    engine = a_busy_engine(a_policy(), DEAR)
    engine.submit("gold", "high", prompt=40, output=1)
    while engine.scheduler.has_work:
        engine.step()
    tenants = engine.scheduler.stats().tenants
    assert {name: len(engine.output[name]) for name in LOW} == dict.fromkeys(LOW, 30)
    assert tenants["low"].output_tokens == 4 * 30
    assert tenants["low"].deferred_decodes == 4
    assert tenants["gold"].deferred_decodes == 0
