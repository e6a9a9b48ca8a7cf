"""The seam between deciding and computing."""

from dataclasses import dataclass
from typing import Protocol

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """KV memory of an executor, in blocks of `block_size` tokens.

    Attributes:
        num_blocks: On the device.
        num_host_blocks: In host memory, for swapped-out requests; 0 = recompute only.
        block_bytes: Of one block; simulated executors have those of the model that they stand for.
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    block_bytes: int = 0


class Executor(Protocol):
    """Computes steps. The loop knows nothing else about the device."""

    @property
    def capacity(self) -> Capacity:
        """KV memory, fixed at start-up."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan: swaps begin, copies on write are done, rows are computed.

        The rows' keys and values are written, and a token is sampled where `samples` is set. A plan
        without rows, but with open fences, is waited for: at least one fence passes.

        Raises:
            ExecutorError: The step did not complete; the KV cache content of the plan's requests
                is undefined from here on.
        """
        ...

    def measure(self) -> ExecutorCosts:
        """Return how long steps and copies take: measured, or known. Call it before the first step.

        What is measured leaves nothing behind in the KV cache.
        """
        ...


class ExecutorError(RuntimeError):
    """A step did not complete."""
