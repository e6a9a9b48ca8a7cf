"""However requests differ, backlogged tenants stay within a constant of each other.

Source of the bound: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024,
section 4. Weights divide it, and with chunked prefill several prompts may be half read.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_policies.fairness import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from tidegate_testing.policies import a_snapshot, a_tenant
from tidegate_testing.simulation import BLOCK_SIZE, a_simulation
from tidegate_testing.simulation_load import charged_service, requests_of, steady_cost

MAX_PARTIAL_PREFILLS = 2

lengths = st.integers(1, 40)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """Two tenants that both always have requests waiting; pairs are theirs, in order.

    Attributes:
        longest_prompts: Lengths are drawn from 1 token to these.
        places: Most requests in the batch.
        budget: Most tokens in a step.
        head_start: Steps before the second one comes.
    """

    weights: tuple[int, int]
    longest_prompts: tuple[int, int]
    longest_outputs: tuple[int, int]
    places: int
    blocks: int
    budget: int
    head_start: int = 0
    seed: int = 0

    @property
    def u(self) -> float:
        """What a whole batch, or all prompts being read, cost at most, over the smaller weight."""
        pairs = zip(self.longest_prompts, self.longest_outputs, strict=True)
        longest = max(prompt + output for prompt, output in pairs)
        batch_tokens = min(self.blocks * BLOCK_SIZE, self.places * longest)
        prompt_tokens = max(self.longest_prompts) * MAX_PARTIAL_PREFILLS
        cost = max(PROMPT_TOKEN_COST * prompt_tokens, OUTPUT_TOKEN_COST * batch_tokens)
        return cost / min(self.weights)

    def largest_gain(self, *, requests: int, steps: int) -> float:
        """Return the most normalised service that one has gained on the other in any interval.

        Args:
            requests: That each has. The contest ends when one has none waiting any more.
            steps: After so many it ends, too.
        """
        names = ("a", "b")
        rules = [a_tenant(n, weight=w) for n, w in zip(names, self.weights, strict=True)]
        simulation = a_simulation(
            a_snapshot(*rules),
            blocks=self.blocks,
            max_num_seqs=self.places,
            max_batched_tokens=self.budget,
            cost=steady_cost(0.02),
            check_every=100,
        )
        draw = random.Random(self.seed)
        for i, name in enumerate(names):
            prompt, output = self.longest_prompts[i], self.longest_outputs[i]
            sizes = [(draw.randint(1, prompt), draw.randint(1, output)) for _ in range(requests)]
            simulation.accept(*requests_of(name, sizes))
            simulation.steps(self.head_start if i == 0 else 0)
        leads = []
        for _ in range(steps):
            if not all(tenant.waiting for tenant in simulation.scheduler.stats().tenants.values()):
                break
            service = charged_service(simulation)
            leads.append(service["a"] / self.weights[0] - service["b"] / self.weights[1])
            simulation.step()
        # What is gained in an interval is how far the lead goes in it.
        return max(leads) - min(leads) if leads else 0.0


contests = st.builds(
    Contest,
    weights=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    longest_prompts=st.tuples(lengths, lengths),
    longest_outputs=st.tuples(lengths, lengths),
    places=st.integers(1, 6),
    blocks=st.integers(8, 40),
    budget=st.integers(8, 64),
    head_start=st.integers(0, 60),
    seed=st.integers(0, 1000),
)


@given(contest=contests)
@settings(max_examples=50, deadline=None)
def test_normalised_service_of_two_backlogged_tenants_differs_by_at_most_2_u(
    contest: Contest,
) -> None:
    assert contest.largest_gain(requests=120, steps=300) <= 2 * contest.u


@pytest.mark.parametrize(
    ("weights", "blocks", "longest_prompts"),
    [((1, 20), 300, (400, 4000)), ((1, 4), 200, (200, 2500)), ((1, 4), 200, (20, 2500))],
)
def test_the_bound_holds_for_one_whose_requests_need_most_of_the_pool_beside_small_ones(
    weights: tuple[int, int], blocks: int, longest_prompts: tuple[int, int]
) -> None:
    contest = Contest(
        weights=weights,
        longest_prompts=longest_prompts,
        longest_outputs=(400, 400),
        places=256,
        blocks=blocks,
        budget=2048,
    )

    assert contest.largest_gain(requests=500, steps=3000) <= 2 * contest.u
