"""The seam between deciding and computing."""

from dataclasses import dataclass
from typing import Protocol

from tidegate_engine.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """KV memory of an executor, in blocks of `block_size` tokens.

    Attributes:
        num_blocks: On the device.
        num_host_blocks: In host memory, for swapped-out requests; 0 = recompute only.
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int


class Executor(Protocol):
    """Computes steps. The loop knows nothing else about the device."""

    @property
    def capacity(self) -> Capacity:
        """KV memory, fixed at start-up."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step: write the rows' keys and values, sample where `samples` is set.

        Raises:
            ExecutorError: The step did not complete; the KV cache content of the plan's requests
                is undefined from here on.
        """
        ...


class ExecutorError(RuntimeError):
    """A step did not complete."""
