"""A scheduler on simulated hardware and in virtual time, watched from outside."""

from collections.abc import Callable, Iterable

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.decisions import Decision, Verdict
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import StepPlan, StepResult, SwapCopy
from tidegate_engine.core.request import Request
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.hardware import H100_80G, LLAMA_3_1_8B, fitting_capacity
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost, Roofline, StepCost
from tidegate_engine.replay.driver import Replay
from tidegate_policies.rules import KvEstimate, TenantRule, WatermarkRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.policies import a_snapshot
from tidegate_testing.scheduling import VOCAB_SIZE, a_request

BLOCK_SIZE = 16


class WatchedExecutor:
    """Carries plans out by another executor, and keeps them.

    Attributes:
        plans: Every executed one, in order.
        copying: The swaps in flight, by fence.
        at_execution: Called while a plan is executed: what happens in a step's midst.
    """

    def __init__(self, inner: Executor) -> None:
        self.plans: list[StepPlan] = []
        self.copying: dict[int, SwapCopy] = {}
        self.at_execution: Callable[[], None] | None = None
        self._inner = inner

    @property
    def capacity(self) -> Capacity:
        """The inner executor's."""
        return self._inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan."""
        self.plans.append(plan)
        self.copying |= {swap.fence: swap for swap in (*plan.swap_out, *plan.swap_in)}
        result = self._inner.execute(plan)
        if self.at_execution is not None:
            self.at_execution()
        for fence in result.passed_fences:
            del self.copying[fence]
        return result

    def measure(self) -> ExecutorCosts:
        """Return what the inner executor measured."""
        return self._inner.measure()


class Simulation(Replay):
    """A replay that keeps its plans and verifies the scheduler's books.

    Attributes:
        decisions: All that the scheduler decided, in order.
    """

    scheduler: Scheduler
    executor: WatchedExecutor

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: WatchedExecutor,
        clock: VirtualClock,
        check_every: int,
    ) -> None:
        super().__init__(scheduler=scheduler, executor=executor, clock=clock)
        self.decisions: list[Decision] = []
        self._check_every = check_every
        self._steps = 0

    @property
    def plans(self) -> list[StepPlan]:
        """Every executed plan, in order."""
        return self.executor.plans

    def step(self) -> StepPlan:
        """Go one step further; now and then verify the invariants."""
        plan = super().step()
        self.decisions += plan.decisions
        self._steps += 1
        if self._steps % self._check_every == 0:
            self.scheduler.check_invariants()
        return plan

    def steps(self, count: int) -> list[StepPlan]:
        """Go so many steps further."""
        return [self.step() for _ in range(count)]

    def accept(self, *requests: Request) -> None:
        """Submit requests that must not be refused."""
        for request in requests:
            rejection = self.submit(request)
            if rejection is not None:
                raise AssertionError(rejection.message)

    def arrive(self, *names: str, tenant: str = "acme", blocks: int = 1, output: int = 200) -> None:
        """Submit requests with prompts of their own, 8 tokens short of so many blocks."""
        for name in names:
            prompt = a_prompt(len(self.log.requests), blocks * BLOCK_SIZE - 8)
            self.accept(a_request(tenant, prompt=prompt, output=output, request_id=name))

    def obey(self, policy: PolicySnapshot) -> None:
        """Put another policy in force with the next step."""
        self.scheduler.apply_policy(policy, self.scheduler.revision + 1)

    def output(self, request_id: str) -> list[int]:
        """Return the output tokens of a request so far."""
        return self.log.requests[request_id].token_ids

    def used_blocks(self, tenant: str) -> int:
        """Return the KV blocks that a tenant holds."""
        return self.scheduler.stats().tenants[tenant].kv_used_blocks

    def preempted(self) -> list[Decision]:
        """Return every preemption so far."""
        return [d for d in self.decisions if d.verdict is Verdict.PREEMPTED]


def a_simulation(
    policy: PolicySnapshot,
    *,
    blocks: int,
    host_blocks: int = 0,
    cost: StepCost | None = None,
    max_num_seqs: int = 64,
    max_batched_tokens: int = 2048,
    check_every: int = 1,
) -> Simulation:
    """Build an engine of blocks of 16 tokens in which `policy` is in force as revision 1.

    Args:
        policy: In force from the first step on.
        blocks: On the device.
        host_blocks: On the host; 0 = preemption is by recompute.
        cost: Of steps and copies; None = 10 ms a step and 0.1 ms a token and a swapped block.
        max_num_seqs: Of the engine.
        max_batched_tokens: Of the engine.
        check_every: The scheduler's invariants are verified once in so many steps.
    """
    cost = cost or AffineCost(ExecutorCosts())
    clock = VirtualClock()
    capacity = Capacity(num_blocks=blocks, num_host_blocks=host_blocks, block_size=BLOCK_SIZE)
    scheduler = Scheduler(
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        num_host_blocks=host_blocks,
        limits=EngineLimits(max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens),
        costs=cost.costs,
    )
    scheduler.apply_policy(policy, 1)
    scheduler.plan_step(clock.now())
    simulated = SimulatedExecutor(capacity=capacity, vocab_size=VOCAB_SIZE, cost=cost, clock=clock)
    return Simulation(
        scheduler=scheduler,
        executor=WatchedExecutor(simulated),
        clock=clock,
        check_every=check_every,
    )


def admitting_by_present_need(*tenants: TenantRule, **fields: object) -> PolicySnapshot:
    """Build a policy that foresees nothing and has its watermarks out of the way.

    There are three tiers, "high", "standard" and "low"; `fields` are those of `a_snapshot`.
    """
    rest: dict[str, object] = {
        "tiers": {"high": 10, "standard": 0, "low": -10},
        "kv_estimate": KvEstimate.OPTIMISTIC,
        "watermarks": WatermarkRule(low_percent=98, high_percent=99),
        **fields,
    }
    return a_snapshot(*tenants, **rest)  # type: ignore[arg-type]


def an_h100_with_llama_8b(policy: PolicySnapshot, *, max_batched_tokens: int = 8192) -> Simulation:
    """Build an engine with as many blocks as are left on an H100 beside Llama-3.1-8B."""
    capacity = fitting_capacity(H100_80G, LLAMA_3_1_8B, block_size=BLOCK_SIZE)
    return a_simulation(
        policy,
        blocks=capacity.num_blocks,
        cost=Roofline(gpu=H100_80G, model=LLAMA_3_1_8B, block_size=BLOCK_SIZE),
        max_num_seqs=256,
        max_batched_tokens=max_batched_tokens,
        check_every=10,
    )


def a_prompt(number: int, tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares no prefix with another number's."""
    return (number, *range(1, tokens))


def quantile(values: Iterable[float], share: float) -> float:
    """Return the least value that at least this share of all doesn't exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def output_alone(request: Request, *, blocks: int, policy: PolicySnapshot) -> list[int]:
    """Return the output that a request has with the whole engine to itself."""
    simulation = a_simulation(policy, blocks=blocks)
    simulation.accept(request)
    simulation.drain()
    return simulation.output(request.request_id)
