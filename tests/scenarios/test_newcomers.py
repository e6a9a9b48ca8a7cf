"""Who was idle has no credit: it gains at most one U over those who were busy meanwhile.

U is the larger of what the prompts being read and what the batch's KV can cost, over the smaller
weight.
"""

import itertools
from collections.abc import Mapping

import pytest

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_policies.rules import BatchingRule, WatermarkRule
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_prompt, a_simulation

IDLE_SECONDS = 600.0
BLOCKS, PROMPT_TOKENS, PARTIAL_PREFILLS = 48, 64, 2
U = max(
    PROMPT_TOKEN_COST * PROMPT_TOKENS * PARTIAL_PREFILLS,
    OUTPUT_TOKEN_COST * BLOCKS * BLOCK_SIZE,
)
BACKLOG = 4
_numbers = itertools.count()


def an_engine(weights: Mapping[str, int]) -> Simulation:
    """Build an engine that serves 4 requests at a time, in steps of 100 ms."""
    policy = a_snapshot(
        *(a_tenant(name, weight=weight) for name, weight in weights.items()),
        batching=BatchingRule(max_num_seqs=4, max_partial_prefills=PARTIAL_PREFILLS),
        watermarks=WatermarkRule(low_percent=90, high_percent=95),
    )
    cost = AffineCost(ExecutorCosts(step_seconds=0.1))
    return a_simulation(policy, blocks=BLOCKS, cost=cost, check_every=50)


def keep_backlogged(engine: Simulation, tenants: tuple[str, ...], *, until: float) -> None:
    """Let these tenants have requests waiting all the time."""
    while engine.clock.now() < until:
        stats = engine.scheduler.stats().tenants
        for tenant in tenants:
            for _ in range(BACKLOG - stats[tenant].waiting):
                number = next(_numbers)
                prompt = a_prompt(number, PROMPT_TOKENS)
                engine.accept(a_request(tenant, prompt=prompt, output=64 + number % 32))
        engine.steps(10)


def normalised_service(engine: Simulation, weights: Mapping[str, int]) -> dict[str, float]:
    stats = engine.scheduler.stats().tenants
    return {tenant: stats[tenant].service / weight for tenant, weight in weights.items()}


def most_gained(engine: Simulation, weights: Mapping[str, int]) -> float:
    """Let all be backlogged for 10 minutes from now; return what "new" is at most ahead by."""
    start, ahead = normalised_service(engine, weights), 0.0
    gained = dict.fromkeys(weights, 0.0)
    began = engine.clock.now()
    for seconds in range(5, 601, 5):
        keep_backlogged(engine, tuple(weights), until=began + seconds)
        now = normalised_service(engine, weights)
        gained = {tenant: now[tenant] - start[tenant] for tenant in weights}
        ahead = max(ahead, *(gained["new"] - gained[t] for t in weights if t != "new"))
    assert min(gained.values()) > 3 * U, "too short a time to tell"
    return ahead


@pytest.mark.parametrize("weight", [1, 3])
def test_a_newcomer_gains_at_most_one_u_over_those_who_were_active_meanwhile(weight: int) -> None:
    weights = {"busy": 1, "heavy": 2, "new": weight}
    engine = an_engine(weights)
    engine.accept(a_request("new", prompt=a_prompt(next(_numbers), PROMPT_TOKENS), output=8))
    keep_backlogged(engine, ("busy", "heavy"), until=IDLE_SECONDS)
    idle = normalised_service(engine, weights)
    assert idle["busy"] - idle["new"] > 3 * U, "nothing to be banked"
    assert most_gained(engine, weights) <= U / min(weights.values())


@pytest.mark.parametrize("first_back", ["new", "busy"])
def test_a_newcomer_gains_at_most_one_u_also_when_nobody_is_active_as_it_comes(
    first_back: str,
) -> None:
    weights = {"busy": 1, "heavy": 2, "new": 1}
    engine = an_engine(weights)
    engine.accept(a_request("new", prompt=a_prompt(next(_numbers), PROMPT_TOKENS), output=8))
    keep_backlogged(engine, ("busy", "heavy"), until=IDLE_SECONDS - 60)
    engine.drain()
    engine.run_until(IDLE_SECONDS)
    assert not engine.scheduler.has_work
    engine.accept(a_request(first_back, prompt=a_prompt(next(_numbers), PROMPT_TOKENS), output=8))
    assert most_gained(engine, weights) <= U / min(weights.values())
