"""A whole engine in virtual time: the scheduler on the simulated executor, and load for it."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import Request
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost, StepCost
from tidegate_engine.replay.driver import Replay
from tidegate_engine.replay.log import RequestTrace
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.scheduling import VOCAB_SIZE, a_request

BLOCK_SIZE = 16


@dataclass(kw_only=True)
class Simulation:
    """A scheduler driven through virtual time, and what came out of it.

    Attributes:
        plans: Every plan with rows, in order.
        checks_invariants: Whether each step is followed by a check of the scheduler's books, which
            costs more than the step.
    """

    scheduler: Scheduler
    replay: Replay
    clock: VirtualClock
    plans: list[StepPlan] = field(default_factory=list)
    checks_invariants: bool = True

    def submit(self, *requests: Request) -> None:
        """Queue requests that must be accepted."""
        for request in requests:
            rejection = self.replay.submit(request)
            if rejection is not None:
                raise AssertionError(rejection.message)

    def trace(self, request: Request) -> RequestTrace:
        """Return what became of a request."""
        return self.replay.log.requests[request.request_id]

    def output(self, request: Request) -> list[int]:
        """Return the output tokens of a request."""
        return self.trace(request).token_ids

    def step(self) -> StepPlan:
        """Carry out one step, or wait for whatever lets one be carried out."""
        plan = self.replay.step()
        if plan.rows:
            self.plans.append(plan)
        elif plan.wake_at is not None and not plan.num_open_fences:
            self.clock.advance_to(plan.wake_at)
        if self.checks_invariants:
            self.scheduler.check_invariants()
        return plan

    def steps(self, count: int) -> None:
        """Carry out `count` steps."""
        for _ in range(count):
            self.step()

    def run_until(self, time: float) -> None:
        """Carry out the steps up to a time; there must be work until then."""
        while (now := self.clock.now()) < time:
            self.step()
            if self.clock.now() == now:
                raise AssertionError(f"nothing to do at {now:g} s: {self.scheduler.stats()}")

    def drain(self, *, at_most: int = 20_000) -> None:
        """Run until nothing is left; fail when `at_most` steps are not enough."""
        for _ in range(at_most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work left after {at_most} steps: {self.scheduler.stats()}")

    def service(self, *tenants: str) -> float:
        """Return the service that these tenants were charged so far, in cost units."""
        stats = self.scheduler.stats().tenants
        return sum(stats[tenant].service for tenant in tenants)


def a_simulation(
    policy: PolicySnapshot,
    *,
    blocks: int = 4096,
    host_blocks: int = 0,
    costs: ExecutorCosts | None = None,
    cost: StepCost | None = None,
    limits: EngineLimits | None = None,
    checks_invariants: bool = True,
) -> Simulation:
    """Build an engine with blocks of 16 tokens, in which `policy` is in force as revision 1.

    Without limits it has 64 places, and 2048 tokens in a step.
    """
    limits = limits or EngineLimits(max_num_seqs=64, max_batched_tokens=2048)
    cost = cost or AffineCost(costs or ExecutorCosts())
    clock = VirtualClock()
    scheduler = Scheduler(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=host_blocks,
        limits=limits,
        costs=cost.costs,
    )
    scheduler.apply_policy(policy, 1)
    scheduler.plan_step(clock.now())
    executor = SimulatedExecutor(
        capacity=Capacity(num_blocks=blocks, num_host_blocks=host_blocks, block_size=BLOCK_SIZE),
        vocab_size=VOCAB_SIZE,
        cost=cost,
        clock=clock,
    )
    return Simulation(
        scheduler=scheduler,
        replay=Replay(scheduler=scheduler, executor=executor, clock=clock),
        clock=clock,
        checks_invariants=checks_invariants,
    )


def a_prompt(length: int, *, seed: object) -> tuple[int, ...]:
    """Draw the tokens of a prompt that shares no block with those of other seeds."""
    draw = random.Random(f"prompt {seed}")
    return tuple(draw.choices(range(VOCAB_SIZE), k=length))


def a_load(
    tenant: str, count: int, *, prompt: int, output: int, name: str | None = None
) -> list[Request]:
    """Build requests of a tenant with prompts of their own.

    Args:
        tenant: Who sends them.
        count: How many.
        prompt: Tokens of each prompt.
        output: Most output tokens of each.
        name: Begins their ids and decides their prompts; None = the tenant's.
    """
    return list(requests_of(tenant, [(prompt, output)] * count, name=name))


def requests_of(
    tenant: str, sizes: Iterable[tuple[int, int]], *, name: str | None = None
) -> Iterator[Request]:
    """Yield requests with so many prompt and output tokens; otherwise as `a_load`."""
    for i, (prompt, output) in enumerate(sizes):
        request_id = f"{name or tenant}-{i}"
        yield a_request(
            tenant, prompt=a_prompt(prompt, seed=request_id), output=output, request_id=request_id
        )


def output_alone(request: Request, policy: PolicySnapshot) -> list[int]:
    """Return the output of a request that has an engine to itself."""
    simulation = a_simulation(policy)
    simulation.submit(request)
    simulation.drain()
    return simulation.output(request)


def first_rows(plans: list[StepPlan], request: Request) -> int:
    """Return the number of plans before the first one that computes something of a request."""
    return next(
        i for i, p in enumerate(plans) if any(r.request_id == request.request_id for r in p.rows)
    )
