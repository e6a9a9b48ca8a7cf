"""However requests differ, backlogged tenants stay within a constant of each other.

Source of the bound: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
section 4. Weights divide it, and with chunked prefill several prompts may be half read.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.simulation import BLOCK_SIZE, Simulation, a_simulation
from tidegate_testing.simulation_load import charged_service, requests_of, steady_cost

REQUESTS = 150
STEPS = 400
MAX_PARTIAL_PREFILLS = 2

lengths = st.integers(1, 40)


def is_backlogged(simulation: Simulation) -> bool:
    return all(tenant.waiting for tenant in simulation.scheduler.stats().tenants.values())


@given(
    weights=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    longest_prompts=st.tuples(lengths, lengths),
    longest_outputs=st.tuples(lengths, lengths),
    places=st.integers(1, 6),
    blocks=st.integers(8, 40),
    budget=st.integers(8, 64),
    head_start=st.integers(0, 100),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_normalised_service_of_two_backlogged_tenants_differs_by_at_most_2_u(
    weights: tuple[int, int],
    longest_prompts: tuple[int, int],
    longest_outputs: tuple[int, int],
    places: int,
    blocks: int,
    budget: int,
    head_start: int,
    seed: int,
) -> None:
    draw = random.Random(seed)
    names = ("a", "b")
    simulation = a_simulation(
        a_snapshot(*[a_tenant(n, weight=w) for n, w in zip(names, weights, strict=True)]),
        blocks=blocks,
        max_num_seqs=places,
        max_batched_tokens=budget,
        cost=steady_cost(0.02),
        check_every=50,
    )
    for name, prompt, output in zip(names, longest_prompts, longest_outputs, strict=True):
        sizes = [(draw.randint(1, prompt), draw.randint(1, output)) for _ in range(REQUESTS)]
        simulation.accept(*requests_of(name, sizes))
        if name == "a":  # the other one comes when it has long been served
            simulation.steps(head_start)
    longest = max(p + o for p, o in zip(longest_prompts, longest_outputs, strict=True))
    batch_tokens = min(blocks * BLOCK_SIZE, places * longest)
    prompt_tokens = max(longest_prompts) * MAX_PARTIAL_PREFILLS
    u = max(PROMPT_TOKEN_COST * prompt_tokens, OUTPUT_TOKEN_COST * batch_tokens) / min(weights)

    leads: list[float] = []
    while is_backlogged(simulation) and len(leads) < STEPS:
        service = charged_service(simulation)
        first, second = (service[n] / w for n, w in zip(names, weights, strict=True))
        leads.append(first - second)
        simulation.step()

    # The bound holds over every interval, so that it is the span of the lead over all of it.
    assert max(leads, default=0.0) - min(leads, default=0.0) <= 2 * u
