"""Engines on any executor, whose outputs are held against those of each request alone."""

import dataclasses
import random
from collections import deque
from itertools import takewhile

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.limits import EngineLimits
from tidegate_engine.core.plan import SampledToken, StepPlan, StepResult, SwapCopy
from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.scheduler import Scheduler
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import VirtualClock
from tidegate_engine.executor.open_swaps import OpenSwaps
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.executors import NUM_BLOCKS, Generation, Steps
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, WatchedExecutor

GREEDY = SamplingParams(temperature=0.0)
# From a few tokens, so that hardly ever a draw falls where rounding decides it; with penalties, so
# that every token of the context counts.
SEEDED = SamplingParams(
    seed=5,
    temperature=1.0,
    top_k=8,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.7,
)

TIE = 1e-3
"""Below this gap between the two best logits, rounding may decide."""


class LateCopies:
    """Carries plans out by another executor, its swaps only some steps after they were planned.

    So they are in flight over several steps also where a copy is a matter of a moment. What touches
    their blocks meanwhile is refused.
    """

    def __init__(self, inner: Executor, *, steps: int) -> None:
        """Begin with nothing in flight; `steps` = 0 does all with the step itself."""
        self._inner = inner
        self._delay = steps
        self._number = 0
        self._open_swaps = OpenSwaps(inner.capacity)
        self._waiting: deque[tuple[int, StepPlan]] = deque()

    @property
    def capacity(self) -> Capacity:
        """The inner executor's."""
        return self._inner.capacity

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan, and the swaps whose time has come."""
        if not self._delay:
            return self._inner.execute(plan)
        self._open_swaps.begin(plan)
        self._number += 1
        for swap in plan.swap_out:
            self._postpone(plan, swap_out=(swap,))
        for swap in plan.swap_in:
            self._postpone(plan, swap_in=(swap,))
        bare = dataclasses.replace(plan, swap_out=(), swap_in=(), num_open_fences=0)
        result = self._inner.execute(bare)
        passed: list[int] = []
        must_pass = not plan.rows
        while self._waiting and (must_pass or self._waiting[0][0] <= self._number):
            must_pass = False
            passed += self._inner.execute(self._waiting.popleft()[1]).passed_fences
        for fence in passed:
            self._open_swaps.end(fence)
        return dataclasses.replace(result, passed_fences=tuple(passed))

    def measure(self) -> ExecutorCosts:
        """Return what the inner executor measured."""
        return self._inner.measure()

    def _postpone(self, plan: StepPlan, **swaps: tuple[SwapCopy, ...]) -> None:
        copying = StepPlan(step=plan.step, revision=plan.revision, num_open_fences=1, **swaps)  # type: ignore[arg-type]
        self._waiting.append((self._number + self._delay, copying))


@dataclasses.dataclass
class Lab:
    """One executor, and the engines that use it one after the other."""

    executor: Executor
    clock: VirtualClock

    def engine(
        self,
        policy: PolicySnapshot,
        *,
        blocks: int = NUM_BLOCKS,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 64,
        late_by: int = 0,
    ) -> Simulation:
        """Build an engine that knows of nothing that was computed before.

        Args:
            policy: In force from the first step on.
            blocks: Of the executor's, as many as are used.
            max_num_seqs: Requests in one batch.
            max_batched_tokens: Tokens in one step.
            late_by: Steps by which the executor's swaps come late.
        """
        capacity = self.executor.capacity
        scheduler = Scheduler(
            num_blocks=blocks,
            block_size=capacity.block_size,
            num_host_blocks=capacity.num_host_blocks,
            limits=EngineLimits(max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens),
        )
        scheduler.apply_policy(policy, 1)
        scheduler.plan_step(self.clock.now())
        return Simulation(
            scheduler=scheduler,
            executor=WatchedExecutor(LateCopies(self.executor, steps=late_by)),
            clock=self.clock,
            check_every=1,
        )

    def alone(self, request: Request) -> list[SampledToken]:
        """Compute a request alone, its prompt in one chunk, without any scheduler."""
        sampling = dataclasses.replace(request.sampling, logprobs=2)
        generation = Generation(
            Steps(self.executor),
            [*request.prompt_ids],
            [*range(NUM_BLOCKS)],
            sampling=sampling,
        )
        tokens: list[SampledToken] = []
        while len(tokens) < request.max_output_tokens:
            row = generation.row()
            result = generation.steps.run(row)
            generation.take(row, result)
            tokens.append(result.tokens[generation.request_id])
        return tokens

    def assert_as_alone(self, engine: Simulation, *requests: Request) -> None:
        """Hold finished requests against what each of them has alone, token for token.

        Greedy outputs count up to where rounding may decide, as a kernel may round otherwise
        beside others; that mustn't be the case in their first half.

        Raises:
            AssertionError: One of them differs.
        """
        for request in requests:
            alone = self.alone(request)
            output = engine.output(request.request_id)
            expected = [token.token_id for token in alone]
            count = len(expected)
            if request.sampling.temperature == 0.0:
                count = sum(1 for _ in takewhile(_is_decided, alone))
            if 2 * count < len(expected):
                raise AssertionError(f"{request.request_id} is decided for {count} tokens only")
            if len(output) != len(expected) or output[:count] != expected[:count]:
                raise AssertionError(f"{request.request_id} got {output}, alone {expected}")


def some_tokens(number: int, count: int) -> tuple[int, ...]:
    """Return tokens that every model knows, and that no other number begins with."""
    draw = random.Random(number)
    return tuple(draw.randrange(3, 250) for _ in range(count))


def a_load(
    tenant: str, *prompts: tuple[int, ...], output: int, sampling: SamplingParams | None = None
) -> list[Request]:
    """Build requests named after their tenant: by turns greedy and seeded, or all alike."""
    return [
        a_request(
            tenant,
            prompt=prompt,
            output=output,
            request_id=f"{tenant}-{i}",
            sampling=sampling or (GREEDY, SEEDED)[i % 2],
        )
        for i, prompt in enumerate(prompts)
    ]


def _is_decided(token: SampledToken) -> bool:
    best = [logprob for _, logprob in token.top_logprobs]
    return len(best) < 2 or best[0] - best[1] >= TIE
