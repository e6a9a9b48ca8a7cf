"""Plans made by hand, for tests of what executors promise."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import BlockCopy, PlanRow, StepPlan, StepResult, SwapCopy
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import Clock, VirtualClock
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_testing.devices import moved
from tidegate_testing.sampling import a_context

BLOCK_SIZE = 4
NUM_BLOCKS = 64
NUM_HOST_BLOCKS = 16

STEP_SECONDS = 1.0
SWAP_BLOCK_SECONDS = 0.75


def a_torch_executor(model: LoadedModel, device: str = "cpu") -> TorchExecutor:
    """Build an executor of 64 blocks of 4 tokens, and 16 on the host."""
    cache = KvCache.allocate(
        model.config,
        num_blocks=NUM_BLOCKS,
        num_host_blocks=NUM_HOST_BLOCKS,
        block_size=BLOCK_SIZE,
        device=device,
    )
    weights = moved(model, device).weights
    return TorchExecutor(Llama(model.config, weights), cache)


def a_slow_executor(clock: Clock | None = None) -> SimulatedExecutor:
    """Build one of the same size, whose steps take a second and whose swaps 0.75 s a block."""
    return SimulatedExecutor(
        capacity=Capacity(
            num_blocks=NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS, block_size=BLOCK_SIZE
        ),
        vocab_size=1000,
        cost=AffineCost(
            ExecutorCosts(
                step_seconds=STEP_SECONDS,
                prefill_token_seconds=0.0,
                decode_seconds=0.0,
                swap_block_seconds=SWAP_BLOCK_SECONDS,
            )
        ),
        clock=clock or VirtualClock(),
    )


@dataclass
class Steps:
    """Executes plans one after the other, and keeps count of open fences.

    Attributes:
        passed: Every fence that was reported, in order.
    """

    executor: Executor
    passed: list[int] = field(default_factory=list)
    _number: int = 0
    _num_begun: int = 0

    def run(
        self,
        *rows: PlanRow,
        copies: Sequence[BlockCopy] = (),
        swap_out: Sequence[SwapCopy] = (),
        swap_in: Sequence[SwapCopy] = (),
    ) -> StepResult:
        """Execute one plan."""
        self._number += 1
        num_begun = self._num_begun + len(swap_out) + len(swap_in)
        plan = StepPlan(
            step=self._number,
            revision=1,
            rows=rows,
            copies=tuple(copies),
            swap_out=tuple(swap_out),
            swap_in=tuple(swap_in),
            num_open_fences=num_begun - len(self.passed),
        )
        result = self.executor.execute(plan)
        self._num_begun = num_begun
        self.passed += result.passed_fences
        return result

    def wait_for(self, fence: int) -> None:
        """Execute plans without rows until a fence has passed."""
        while fence not in self.passed:
            if not self.run().passed_fences:
                raise AssertionError(f"nothing passes while fence {fence} is open")


@dataclass
class Generation:
    """One request: its tokens, where its KV is, and how much of it is computed.

    Attributes:
        num_prompt_tokens: Of `tokens`; unless told otherwise all that it begins with.
    """

    steps: Steps
    tokens: list[int]
    blocks: list[int]
    request_id: str = "r"
    computed: int = 0
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    def row(self, chunk: int = 1000) -> PlanRow:
        """Return the next row, of at most so many tokens."""
        end = min(self.computed + chunk, len(self.tokens))
        return PlanRow(
            request_id=self.request_id,
            start=self.computed,
            token_ids=self.tokens[self.computed : end],
            block_ids=self.blocks,
            samples=end == len(self.tokens),
            sampling=a_context(
                self.sampling, self.tokens, num_prompt_tokens=self.num_prompt_tokens
            ),
            is_decode=self.computed > 0 and end - self.computed == 1,
        )

    def take(self, row: PlanRow, result: StepResult) -> None:
        """Account for a row that was executed."""
        self.computed = row.end
        if row.samples:
            self.tokens.append(result.tokens[self.request_id].token_id)

    def run(self, count: int, *, chunk: int = 1000) -> list[int]:
        """Compute alone until there are `count` more tokens; return these."""
        before = len(self.tokens)
        while len(self.tokens) < before + count:
            row = self.row(chunk)
            self.take(row, self.steps.run(row))
        return self.tokens[before:]
