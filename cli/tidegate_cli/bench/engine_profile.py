"""What the time of an engine's steps is spent on, by PyTorch's profiler."""

import time
from collections import defaultdict

from torch.profiler import ProfilerActivity, profile

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.executor.base import Capacity, Executor

_EVERY = 8
"""Steps from one that is looked at to the next: each slows down by it."""

_LARGEST = 12

# The first part in whose words one is contained in an operation's name; else `REST`.
_PARTS = {
    "attention": ("attention", "bmm", "softmax"),
    "linear layers": ("linear", "addmm", "::mm", "_mm", "matmul", "quant", "mkldnn", "onednn"),
    "KV read and written": ("index_select", "index_copy", "index_put", "gather", "scatter"),
    "sampling": ("argmax", "topk", "sort", "cumsum", "searchsorted"),
}
REST = "norms, rotary, activations, copies"
OUTSIDE = "outside PyTorch's operations (batch building, Python)"


class ProfiledExecutor:
    """An executor some of whose steps are profiled."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_steps = 0
        self._seconds = 0.0
        self._by_operation: dict[str, float] = defaultdict(float)

    @property
    def capacity(self) -> Capacity:
        """KV memory, as of the executor."""
        return self._executor.capacity

    def measure(self) -> ExecutorCosts:
        """Measure the executor."""
        return self._executor.measure()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry a plan out."""
        self._num_steps += 1
        if self._num_steps % _EVERY:
            return self._executor.execute(plan)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            result = self._executor.execute(plan)
            self._seconds += time.perf_counter() - began
        for operation in profiler.key_averages():
            self._by_operation[operation.key] += operation.self_cpu_time_total / 1e6
        return result

    def shares(self) -> dict[str, float]:
        """Return the share of the profiled steps' time by what it was spent on, largest first."""
        seconds: dict[str, float] = defaultdict(float)
        for name, spent in self._by_operation.items():
            seconds[_part_of(name)] += spent
        seconds[OUTSIDE] = max(0.0, self._seconds - sum(self._by_operation.values()))
        return self._largest(seconds)

    def operations(self) -> dict[str, float]:
        """Return the same by the operation's name, for the largest."""
        return self._largest(self._by_operation)

    def _largest(self, seconds: dict[str, float]) -> dict[str, float]:
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        return {name: spent / self._seconds for name, spent in ordered[:_LARGEST]}


def _part_of(name: str) -> str:
    lowered = name.lower()
    found = (part for part, words in _PARTS.items() if any(word in lowered for word in words))
    return next(found, REST)
