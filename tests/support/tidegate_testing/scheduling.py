"""Requests, schedulers and a step driver, for tests of the scheduler and of executors."""

import itertools
from dataclasses import dataclass, field

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan
from tidegate_engine.core.request import FinishReason, Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot

VOCAB_SIZE = 1000
_ids = itertools.count(1)


def a_request(
    tenant: str = "acme",
    *,
    prompt: int | tuple[int, ...] = 4,
    output: int = 2,
    request_id: str | None = None,
    **fields: object,
) -> Request:
    """Build a request; `prompt` is a number of tokens or the tokens, `output` the most tokens."""
    ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    rest: dict[str, object] = {"sampling": SamplingParams(temperature=0.0), **fields}
    return Request(
        request_id=request_id or f"r{next(_ids)}",
        tenant=tenant,
        prompt_ids=ids,
        max_output_tokens=output,
        **rest,  # type: ignore[arg-type]
    )


def a_scheduler(
    policy: PolicySnapshot | None = None,
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 64,
    max_waiting: int = 1000,
    costs: ExecutorCosts | None = None,
) -> Scheduler:
    """Build a scheduler in which `policy` is in force as revision 1."""
    limits = EngineLimits(
        max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens, max_waiting=max_waiting
    )
    scheduler = Scheduler(num_blocks=blocks, block_size=block_size, limits=limits, costs=costs)
    scheduler.apply_policy(policy or a_snapshot(), 1)
    scheduler.plan_step(0.0)
    return scheduler


def a_simulated_executor(*, blocks: int = 64, block_size: int = 4) -> SimulatedExecutor:
    """Build an executor on which no time passes but that of a clock of its own."""
    return SimulatedExecutor(
        capacity=Capacity(num_blocks=blocks, num_host_blocks=blocks, block_size=block_size),
        vocab_size=VOCAB_SIZE,
        cost=AffineCost(ExecutorCosts()),
        clock=VirtualClock(),
    )


@dataclass(kw_only=True)
class Run:
    """A scheduler driven step by step, and all that came out of it.

    Attributes:
        plans: Every plan with rows, in order.
        outputs: Output tokens by request.
        finished: Why requests ended, by request, in order of their end.
    """

    scheduler: Scheduler
    executor: Executor
    plans: list[StepPlan] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, FinishReason] = field(default_factory=dict)

    @property
    def admitted(self) -> list[str]:
        """Requests in the order in which they joined the batch, readmissions included."""
        return [request_id for plan in self.plans for request_id in plan.admitted]

    def submit(self, *requests: Request) -> None:
        """Queue requests that must be accepted."""
        for request in requests:
            rejection = self.scheduler.submit(request, 0.0)
            if rejection is not None:
                raise AssertionError(rejection.message)

    def step(self) -> StepPlan:
        """Plan, execute and commit one step; verify the invariants."""
        plan = self.scheduler.plan_step(0.0)
        self.finished |= dict.fromkeys(plan.ended, FinishReason.LENGTH)
        if plan.rows:
            self.plans.append(plan)
            result = self.executor.execute(plan)
            for output in self.scheduler.commit_step(plan, result, 0.0):
                if output.token is not None:
                    self.outputs.setdefault(output.request_id, []).append(output.token.token_id)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
        self.scheduler.check_invariants()
        return plan

    def steps(self, count: int) -> None:
        """Run `count` steps."""
        for _ in range(count):
            self.step()

    def drain(self, *, at_most: int = 10_000) -> None:
        """Run until nothing is left; fail when `at_most` steps are not enough."""
        for _ in range(at_most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work left after {at_most} steps: {self.scheduler.stats()}")


def a_run(
    policy: PolicySnapshot | None = None, *, costs: ExecutorCosts | None = None, **sizes: int
) -> Run:
    """Build a scheduler with a simulated executor; `sizes` are those of `a_scheduler`."""
    scheduler = a_scheduler(policy, costs=costs, **sizes)
    executor = a_simulated_executor(
        blocks=sizes.get("blocks", 64), block_size=sizes.get("block_size", 4)
    )
    return Run(scheduler=scheduler, executor=executor)


def rows_of(plan: StepPlan) -> list[tuple[str, int, int]]:
    """Return (request, start, tokens) of every row."""
    return [(row.request_id, row.start, len(row.token_ids)) for row in plan.rows]
