"""An executor without weights, whose KV cache can nevertheless be wrong.

Blocks hold fingerprints of the tokens written to them, which copies and swaps move, and the next
token is a hash of the blocks read, the seed and the position. A lost, stale or foreign block
therefore changes the output, as it would with a model; and what a swap still reads or writes,
nothing else may touch.
"""

from collections import deque
from collections.abc import Collection, Sequence

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import (
    BlockCopy,
    PlanRow,
    SampledToken,
    StepPlan,
    StepResult,
    SwapCopy,
)
from tidegate_engine.executor.base import Capacity, ExecutorError
from tidegate_engine.executor.clock import Clock
from tidegate_engine.executor.open_swaps import OpenSwaps
from tidegate_engine.executor.simulated_kv import Content, SimulatedKv
from tidegate_engine.executor.step_cost import StepCost

_GARBAGE = -1


class SimulatedExecutor:
    """Answers plans with reproducible tokens and lets the planned time pass on a clock.

    Swaps run beside the steps, those of a direction one after the other, since the bus between
    device and host carries both directions at once. Content is read when a copy ends, and its
    target is garbage until then.
    """

    def __init__(
        self, *, capacity: Capacity, vocab_size: int, cost: StepCost, clock: Clock
    ) -> None:
        """Start with every block empty.

        Args:
            capacity: KV memory to pretend.
            vocab_size: Tokens are in [0, vocab_size).
            cost: How long steps and copies take.
            clock: On which they take it.
        """
        self.capacity = capacity
        self._vocab_size = vocab_size
        self._cost = cost
        self._costs = cost.costs
        self._clock = clock
        self._kv = SimulatedKv(capacity.num_blocks, capacity.block_size)
        self._garbage: Content = (_GARBAGE,) * capacity.block_size
        self._host: list[Content] = [self._garbage] * capacity.num_host_blocks
        self._open_swaps = OpenSwaps(capacity)
        self._outward = _CopyQueue(self._costs.swap_block_seconds)
        self._inward = _CopyQueue(self._costs.swap_block_seconds)

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan, in no time; then let the time pass that it takes.

        Raises:
            ExecutorError: The plan touches what it mustn't (nothing was then done), or a row names
                a block that there isn't.
        """
        self._open_swaps.begin(plan)
        now = self._clock.now()
        for swap in plan.swap_out:
            self._outward.add(swap, now)
            for block in swap.host_blocks:
                self._host[block] = self._garbage
        for swap in plan.swap_in:
            self._inward.add(swap, now)
            for block in swap.device_blocks:
                self._kv.put(block, self._garbage)
        self._copy(plan.copies)
        try:
            tokens = self._compute(plan)
        except ExecutorError:
            self._end_swaps(plan)
            raise
        if plan.rows:
            self._clock.advance(self._cost.seconds(plan))
            return StepResult(tokens=tokens, passed_fences=self._pass_fences(self._clock.now()))
        if not self._open_swaps:
            return StepResult()
        first_end = min(queue.first_end for queue in (self._outward, self._inward))
        self._clock.advance(first_end - now)
        # Clocks may wake a little early: at least one fence passes all the same.
        return StepResult(passed_fences=self._pass_fences(max(self._clock.now(), first_end)))

    def measure(self) -> ExecutorCosts:
        """Return what the cost model says."""
        return self._costs

    def _compute(self, plan: StepPlan) -> dict[str, SampledToken]:
        tokens = {}
        for row in plan.rows:
            if row.is_padding:
                continue
            try:
                self._kv.write(row)
                if row.samples:
                    tokens[row.request_id] = self._token(row)
            except IndexError as error:
                problem = f"row of request {row.request_id} names a block that there isn't"
                raise ExecutorError(f"step {plan.step}: {problem}") from error
        return tokens

    def _token(self, row: PlanRow) -> SampledToken:
        sampling = row.sampling.params
        drawn = hash((self._kv.read(row), row.end, sampling.seed))
        token_id = drawn % self._vocab_size
        barred = row.sampling.barred_tokens(row.end)
        while token_id in barred:
            token_id = (token_id + 1) % self._vocab_size
        if sampling.logprobs is None:
            return SampledToken(token_id)
        return SampledToken(token_id, 0.0, ((token_id, 0.0),) if sampling.logprobs else ())

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        contents = [self._kv.content(copy.source) for copy in copies]
        for copy, content in zip(copies, contents, strict=True):
            self._kv.put(copy.target, content)

    def _end_swaps(self, plan: StepPlan) -> None:
        """Let go of a failed step's swaps: its requests are dropped, and their blocks go on."""
        fences = [swap.fence for swap in (*plan.swap_out, *plan.swap_in)]
        for queue in (self._outward, self._inward):
            queue.drop(fences)
        for fence in fences:
            self._open_swaps.end(fence)

    def _pass_fences(self, now: float) -> tuple[int, ...]:
        if not self._open_swaps:
            return ()
        ended = []
        for end, swap in self._outward.take(now):
            for host, device in zip(swap.host_blocks, swap.device_blocks, strict=True):
                self._host[host] = self._kv.content(device)
            ended.append((end, swap.fence))
        for end, swap in self._inward.take(now):
            for host, device in zip(swap.host_blocks, swap.device_blocks, strict=True):
                self._kv.put(device, self._host[host])
            ended.append((end, swap.fence))
        fences = tuple(fence for _, fence in sorted(ended))
        for fence in fences:
            self._open_swaps.end(fence)
        return fences


class _CopyQueue:
    """Swaps of one direction, one after the other."""

    def __init__(self, block_seconds: float) -> None:
        self._block_seconds = block_seconds
        self._last_end = -float("inf")
        self._in_flight: deque[tuple[float, SwapCopy]] = deque()

    @property
    def first_end(self) -> float:
        """When the first swap in flight ends; never, if there is none."""
        return self._in_flight[0][0] if self._in_flight else float("inf")

    def add(self, swap: SwapCopy, now: float) -> None:
        """Begin a swap behind those in flight."""
        seconds = self._block_seconds * len(swap.device_blocks)
        self._last_end = max(self._last_end, now) + seconds
        self._in_flight.append((self._last_end, swap))

    def drop(self, fences: Collection[int]) -> None:
        """Forget swaps."""
        self._in_flight = deque(e for e in self._in_flight if e[1].fence not in fences)

    def take(self, now: float) -> list[tuple[float, SwapCopy]]:
        """Take out the swaps that have ended."""
        ended = []
        while self._in_flight and self._in_flight[0][0] <= now:
            ended.append(self._in_flight.popleft())
        return ended
