"""What `auto` means: the fastest of a few ways to compute, by the costs measured of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel

TYPICAL_STEP = StepFeatures(
    prefill_tokens=64, decodes=16, context_tokens=16 * 256, prefill_pairs=64 * 65 // 2
)
"""The step by whose time ways to compute are compared."""

_MIN_GAIN = 0.1
_MAX_CANDIDATES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[T]):
    """A way to compute, and what it costs.

    Attributes:
        way: What was tried.
        costs: As measured.
    """

    way: T
    costs: ExecutorCosts

    @property
    def seconds(self) -> float:
        """Of the typical step."""
        return StepTimeModel(self.costs).predict(TYPICAL_STEP)


def try_all(ways: Sequence[T], measure: Callable[[T], ExecutorCosts]) -> list[Trial[T]]:
    """Measure each way, in order."""
    return [Trial(way=way, costs=measure(way)) for way in ways]


def best_of(trials: Sequence[Trial[T]]) -> Trial[T]:
    """Return the fastest, or an earlier one that is slower by less than a tenth.

    So what costs others something, or exactness, comes later in `trials`, and has to be worth it
    by more than the measurement's noise.
    """
    chosen = trials[0]
    for trial in trials[1:]:
        if trial.seconds < chosen.seconds * (1.0 - _MIN_GAIN):
            chosen = trial
    return chosen


def thread_counts(cores: int) -> list[int]:
    """Return the numbers of threads worth a trial, ascending: all cores, half of them, ..."""
    counts = [cores]
    while counts[-1] > 1 and len(counts) < _MAX_CANDIDATES:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def describe(trials: Sequence[Trial[T]], name: Callable[[T], str]) -> str:
    """Tell what was measured of each way: its typical step and what it is called."""
    return ", ".join(f"{name(trial.way)} {1000 * trial.seconds:.3g} ms" for trial in trials)
