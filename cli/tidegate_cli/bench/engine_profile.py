"""What the time of an engine's steps is spent on, by looking at where they are again and again.

A sample is the line of the engine's own code that a step is in. Kernels let other threads of Python
run while they compute, so that a second thread can look; where one would not, its time counts for
the line after it.
"""

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import StepPlan, StepResult
from tidegate_engine.executor.base import Capacity, Executor

_INTERVAL_SECONDS = 0.001
_PACKAGE = "tidegate_engine"

# What a file is for, or else the first part of whose words one is in the line.
_FILES = {
    "linear.py": "linear layers",
    "sampler.py": "sampling",
    "batch.py": "batch building",
    "kv_copies.py": "copies of KV blocks",
}
_WORDS = {
    "linear layers": (".compute(", "linear(", "multiply_into("),
    "attention": ("attention", "attend", "scaled_dot_product"),
    "norms, rotary, activations": ("norm", "rotat", "gate", "silu", "quantis"),
    "sampling": ("sample(",),
    "batch building": ("build_batch(", ".begin("),
}
REST = "all else"


class ProfiledExecutor:
    """An executor whose steps are looked at while they run."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._samples: Counter[str] = Counter()

    @property
    def capacity(self) -> Capacity:
        """KV memory, as of the executor."""
        return self._executor.capacity

    def measure(self) -> ExecutorCosts:
        """Measure the executor."""
        return self._executor.measure()

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry a plan out."""
        is_over = threading.Event()
        observer = threading.Thread(target=self._observe, args=(threading.get_ident(), is_over))
        observer.start()
        try:
            return self._executor.execute(plan)
        finally:
            is_over.set()
            observer.join()

    def shares(self) -> dict[str, float]:
        """Return the share of the steps' time by what it was spent on, the largest first."""
        total = self._samples.total()
        return {part: count / total for part, count in self._samples.most_common()}

    def _observe(self, thread: int, is_over: threading.Event) -> None:
        while not is_over.wait(_INTERVAL_SECONDS):
            frame = sys._current_frames().get(thread)  # noqa: SLF001 - Python's own way to look
            if frame is not None:
                self._samples[part_of(frame)] += 1


def part_of(frame: FrameType) -> str:
    """Return what a thread is doing, by the innermost line of the engine that tells it."""
    for name, line in _lines(frame):
        if name in _FILES:
            return _FILES[name]
        found = [part for part, words in _WORDS.items() if any(word in line for word in words)]
        if found:
            return found[0]
    return REST


def _lines(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    """Yield file name and line of the engine's frames, the innermost first."""
    while frame is not None:
        path = frame.f_code.co_filename
        if _PACKAGE in path:
            yield PurePath(path).name, linecache.getline(path, frame.f_lineno)
        frame = frame.f_back
