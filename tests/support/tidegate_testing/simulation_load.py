"""Load for simulations: many requests of one tenant, and what became of one."""

import random
from collections.abc import Iterable

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.request import Request
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_testing.scheduling import VOCAB_SIZE, a_request
from tidegate_testing.simulation import Simulation


def a_load(
    tenant: str, count: int, *, prompt: int, output: int, name: str | None = None
) -> list[Request]:
    """Build requests of one size; otherwise as `requests_of`."""
    return requests_of(tenant, [(prompt, output)] * count, name=name)


def requests_of(
    tenant: str, sizes: Iterable[tuple[int, int]], *, name: str | None = None
) -> list[Request]:
    """Build requests with prompts of their own, which share no block.

    Args:
        tenant: Who sends them.
        sizes: Prompt tokens and most output tokens of each.
        name: Begins their ids, and decides the prompts; None = the tenant's.
    """
    requests = []
    for number, (prompt, output) in enumerate(sizes, start=1):
        request_id = f"{name or tenant}-{number}"
        draw = random.Random(request_id)
        prompt_ids = tuple(draw.choices(range(VOCAB_SIZE), k=prompt))
        requests.append(a_request(tenant, prompt=prompt_ids, output=output, request_id=request_id))
    return requests


def steady_cost(step_seconds: float, *, swap_block_seconds: float = 0.0) -> AffineCost:
    """Build the cost of steps that all take as long, whatever they compute."""
    return AffineCost(
        ExecutorCosts(
            step_seconds=step_seconds,
            prefill_token_seconds=0.0,
            decode_seconds=0.0,
            swap_block_seconds=swap_block_seconds,
        )
    )


def began_at(simulation: Simulation, request: Request) -> float:
    """Return when the first step began that computed something of a request."""
    for plan, step in zip(simulation.plans, simulation.log.steps, strict=True):
        if any(row.request_id == request.request_id for row in plan.rows):
            return step.began_at
    raise AssertionError(f"nothing of {request.request_id} was ever computed")


def charged_service(simulation: Simulation) -> dict[str, float]:
    """Return the service that each tenant was charged so far, in cost units."""
    return {name: stats.service for name, stats in simulation.scheduler.stats().tenants.items()}
