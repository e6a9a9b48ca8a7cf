"""Who gets how much of an engine that more is asked of than it can do."""

import hashlib
import random
from collections.abc import Iterable, Mapping

import pytest

from tidegate_engine.core.request import Request
from tidegate_engine.policy_board import PolicyInForce
from tidegate_engine.replay.driver import Arrival
from tidegate_engine.server.identity import Identities
from tidegate_policies.rules import TierRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.simulation import Simulation, a_simulation
from tidegate_testing.simulation_load import (
    a_load,
    began_at,
    charged_service,
    requests_of,
    steady_cost,
)

STEP_SECONDS = 0.02
POINTS = 2.0


def drawn_sizes(count: int, *, seed: object, longest: int = 60) -> list[tuple[int, int]]:
    """Draw prompt and output lengths from 20 tokens to the longest."""
    draw = random.Random(str(seed))
    return [(draw.randint(20, longest), draw.randint(20, longest)) for _ in range(count)]


def percentages(service: Mapping[str, float]) -> dict[str, float]:
    """Return each tenant's part of all service, in percent."""
    total = sum(service.values())
    return {tenant: 100 * part / total for tenant, part in service.items()}


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the service that was charged in between."""
    return {tenant: after[tenant] - before[tenant] for tenant in after}


# -- a tenant beside one with a long queue ---------------------------------------------------------


@pytest.mark.parametrize("crowd", ["a", "z"])  # whose name would come first in a tie
@pytest.mark.parametrize(
    ("places", "blocks", "sizes"),
    [(4, 4096, drawn_sizes(50, seed="places", longest=200)), (64, 60, [(150, 50)] * 50)],
    ids=["bound by places", "bound by memory"],
)
def test_a_newcomer_runs_after_at_most_one_completion_of_a_tenant_with_50_requests(
    crowd: str, places: int, blocks: int, sizes: list[tuple[int, int]]
) -> None:
    simulation = a_simulation(
        a_snapshot(a_tenant(crowd), a_tenant("b")),
        blocks=blocks,
        max_num_seqs=places,
        cost=steady_cost(STEP_SECONDS),
    )
    simulation.accept(*requests_of(crowd, sizes))
    simulation.steps(60)
    arrived_at = simulation.clock.now()
    newcomer = a_load("b", 1, prompt=150, output=50)[0]

    simulation.accept(newcomer)
    simulation.steps(60)

    began = began_at(simulation, newcomer)
    others = [t for t in simulation.log.requests.values() if t.tenant == crowd]
    completions = {t.ended_at for t in others if t.ended_at and arrived_at < t.ended_at <= began}
    assert len(completions) <= 1
    # Nobody whose turn it wasn't was let in before it.
    assert not [t for t in others if t.admitted_at and arrived_at <= t.admitted_at < began]


@pytest.mark.parametrize("prompt", [64, 2000])
def test_a_newcomer_waits_for_one_chunk_where_prompts_are_all_that_takes_time(prompt: int) -> None:
    simulation = a_simulation(
        a_snapshot(a_tenant("a"), a_tenant("b")),
        blocks=4096,
        max_batched_tokens=256,
        cost=steady_cost(STEP_SECONDS),
    )
    simulation.accept(*a_load("a", 50, prompt=2000, output=20))
    simulation.steps(20)
    arrived_at = simulation.clock.now()
    newcomer = a_load("b", 1, prompt=prompt, output=20)[0]

    simulation.accept(newcomer)
    simulation.steps(50)

    # The first step after its arrival may be one chunk of others.
    assert began_at(simulation, newcomer) <= arrived_at + STEP_SECONDS + 1e-9


def requests_by_keys(policy: PolicySnapshot, keys: list[str]) -> list[Request]:
    """Build 60 requests that come with these API keys in turns."""
    identities = Identities()
    identities.use_policy(
        PolicyInForce(snapshot=policy, revision=1, digest=policy.digest, step=1, at=0.0)
    )
    requests = []
    for number, size in enumerate(drawn_sizes(60, seed="keys")):
        tenant = identities.tenant_of(f"Bearer {keys[number % len(keys)]}")
        requests += requests_of(tenant, [size], name=f"request-{number}")
    return requests


def test_a_load_from_one_api_key_and_the_same_from_ten_of_them_get_the_same_service() -> None:
    keys = [f"key-{number}" for number in range(10)]
    digests = tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)
    policy = a_snapshot(a_tenant("a", key_digests=digests), a_tenant("b"))

    def served(keys_in_use: list[str]) -> tuple[dict[str, float], list[str]]:
        simulation = a_simulation(
            policy, blocks=4096, max_num_seqs=4, cost=steady_cost(STEP_SECONDS), check_every=10
        )
        simulation.accept(*requests_of("b", drawn_sizes(60, seed="b")))
        simulation.accept(*requests_by_keys(policy, keys_in_use))
        simulation.steps(300)
        return charged_service(simulation), [r for p in simulation.plans for r in p.admitted]

    service, admitted = served(keys[:1])

    assert served(keys) == (service, admitted)
    assert percentages(service) == pytest.approx({"a": 50.0, "b": 50.0}, abs=3)


# -- reserved shares -------------------------------------------------------------------------------


def gold_arrivals(sizes: Iterable[tuple[int, int]], *, per_second: float) -> list[Arrival]:
    """Let the first 16 come at once, so that there is a queue, and the others at random."""
    draw = random.Random("gold arrivals")
    arrivals, at = [], 0.0
    for number, request in enumerate(requests_of("gold", sizes)):
        at += draw.expovariate(per_second) if number >= 16 else 0.0
        arrivals.append(Arrival(at, request))
    return arrivals


@pytest.mark.parametrize("reserved_percent", [10, 0])
def test_gold_above_capacity_for_10_minutes_leaves_batch_its_reserved_share_and_no_more(
    reserved_percent: int,
) -> None:
    step_seconds, places = 0.1, 8
    simulation = a_simulation(
        a_snapshot(
            a_tenant("gold", tier="gold"),
            a_tenant("batch", tier="batch"),
            tiers={
                "gold": 10,
                "batch": TierRule(name="batch", value=0, reserved_share_percent=reserved_percent),
            },
        ),
        blocks=4096,
        max_num_seqs=places,
        cost=steady_cost(step_seconds),
        check_every=500,
    )
    capacity = places / step_seconds / 40  # requests of 40 output tokens in the mean, per second
    waiting: list[tuple[int, int]] = []

    def watch(_: object) -> None:
        tenants = simulation.scheduler.stats().tenants
        waiting.append((tenants["gold"].waiting, tenants["batch"].waiting))

    simulation.accept(*requests_of("batch", drawn_sizes(600, seed="batch")))
    simulation.run(
        gold_arrivals(drawn_sizes(1900, seed="gold"), per_second=1.5 * capacity),
        until=600.0,
        at_step=watch,
    )

    assert simulation.clock.now() >= 600.0
    assert min(min(both) for both in waiting) > 0  # neither ever lacked requests
    achieved = percentages(charged_service(simulation))
    if reserved_percent:
        assert achieved["batch"] == pytest.approx(reserved_percent, abs=POINTS)
    else:
        assert achieved["batch"] == 0


# -- weights ---------------------------------------------------------------------------------------


def a_backlogged_engine(weights: Mapping[str, int]) -> Simulation:
    """Build an engine in which every tenant's queue outlasts five minutes."""
    simulation = a_simulation(
        weighted(weights),
        blocks=4096,
        max_num_seqs=16,
        cost=steady_cost(0.05),
        check_every=500,
    )
    for tenant in weights:
        simulation.accept(*requests_of(tenant, drawn_sizes(1600, seed=tenant)))
    return simulation


def weighted(weights: Mapping[str, int]) -> PolicySnapshot:
    return a_snapshot(*[a_tenant(name, weight=weight) for name, weight in weights.items()])


def assert_still_backlogged(simulation: Simulation) -> None:
    assert all(tenant.waiting for tenant in simulation.scheduler.stats().tenants.values())


def test_shares_of_backlogged_tenants_are_as_their_weights_over_5_minutes() -> None:
    weights = {"a": 1, "b": 2, "c": 4}
    simulation = a_backlogged_engine(weights)

    simulation.run_until(300.0)

    assert_still_backlogged(simulation)
    achieved = percentages(charged_service(simulation))
    assert achieved == pytest.approx(percentages(weights), abs=POINTS)


def test_a_weight_changed_in_mid_run_shows_in_the_shares_of_the_next_30_seconds() -> None:
    weights, others = {"a": 1, "b": 2, "c": 4}, {"a": 4, "b": 2, "c": 1}
    simulation = a_backlogged_engine(weights)
    simulation.run_until(150.0)
    before = charged_service(simulation)
    assert percentages(before) == pytest.approx(percentages(weights), abs=POINTS)

    simulation.obey(weighted(others))
    simulation.run_until(180.0)

    assert_still_backlogged(simulation)
    since = gained(before, charged_service(simulation))
    assert percentages(since) == pytest.approx(percentages(others), abs=POINTS)
