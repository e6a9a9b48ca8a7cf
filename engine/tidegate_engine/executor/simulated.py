"""An executor without weights, whose KV cache can nevertheless be wrong.

Each KV block holds a fingerprint of the tokens written to it, and the next token is a hash of the
fingerprints read, the seed and the position. A lost, stale or foreign block therefore changes the
output, as it would with a model.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from tidegate_engine.core.plan import PlanRow, SampledToken, StepPlan, StepResult
from tidegate_engine.executor.base import Capacity

_EMPTY = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Time of a step, affine in what it computes.

    Attributes:
        step_seconds: Fixed cost of a step.
        prefill_token_seconds: Cost of each token of a prompt chunk.
        decode_seconds: Cost of each decode.
    """

    step_seconds: float = 0.010
    prefill_token_seconds: float = 0.0001
    decode_seconds: float = 0.0005

    def of(self, plan: StepPlan) -> float:
        """Return the seconds that `plan` takes."""
        prefill = sum(len(row.token_ids) for row in plan.rows if not row.is_decode)
        decodes = sum(1 for row in plan.rows if row.is_decode)
        return (
            self.step_seconds + self.prefill_token_seconds * prefill + self.decode_seconds * decodes
        )


class SimulatedExecutor:
    """Answers plans with reproducible tokens and lets the planned time pass."""

    def __init__(
        self,
        *,
        capacity: Capacity,
        vocab_size: int,
        cost: StepCost,
        pace: Callable[[float], None],
    ) -> None:
        """Start with every block empty.

        Args:
            capacity: KV memory to pretend.
            vocab_size: Tokens are in [0, vocab_size).
            cost: How long steps take.
            pace: Lets seconds pass: `time.sleep`, or a virtual clock's advance.
        """
        self.capacity = capacity
        self._vocab_size = vocab_size
        self._cost = cost
        self._pace = pace
        self._blocks: list[bytes] = [_EMPTY] * capacity.num_blocks

    def execute(self, plan: StepPlan) -> StepResult:
        """Write every row's tokens into its blocks, then answer the rows that sample."""
        for row in plan.rows:
            self._write(row)
        tokens = {row.request_id: self._sample(row) for row in plan.rows if row.samples}
        self._pace(self._cost.of(plan))
        return StepResult(tokens=tokens)

    def _write(self, row: PlanRow) -> None:
        size = self.capacity.block_size
        for position, token in enumerate(row.token_ids, start=row.start):
            block = row.block_ids[position // size]
            before = _EMPTY if position % size == 0 else self._blocks[block]
            self._blocks[block] = _digest(before, position, token)

    def _sample(self, row: PlanRow) -> SampledToken:
        size = self.capacity.block_size
        num_blocks = -(-row.end // size)
        read = b"".join(self._blocks[block] for block in row.block_ids[:num_blocks])
        drawn = int.from_bytes(_digest(read, row.end, row.sampling.seed))
        token_id = drawn % self._vocab_size
        wants_logprobs = row.sampling.logprobs is not None
        return SampledToken(
            token_id=token_id,
            logprob=0.0 if wants_logprobs else None,
            top_logprobs=((token_id, 0.0),) if row.sampling.logprobs else (),
        )


def _digest(content: bytes, position: int, value: int) -> bytes:
    return hashlib.blake2b(content + b"%d,%d" % (position, value), digest_size=8).digest()
