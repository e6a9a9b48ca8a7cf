"""How long a model's steps and copies take on this machine."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import PlanRow, SampledToken, SwapCopy
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.core.step_time import StepFeatures
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.kv_copies import KvCopies
from tidegate_engine.model.config import LlamaConfig

Compute = Callable[[Sequence[PlanRow], KvCache], Mapping[str, SampledToken]]
"""Computes a step's rows in a KV cache; returns when it is done."""

Clock = Callable[[], float]

_MIN_ROUNDS = 2
_MAX_ROUNDS = 8
_ENOUGH_SECONDS = 1.5
"""No further round begins after so much time."""

_NUM_SWAP_BLOCKS = 16


class StepShape(NamedTuple):
    """A step whose rows are alike: decodes, each at a position, and a prompt chunk at another."""

    decodes: int
    context: int
    chunk: int
    start: int

    @property
    def features(self) -> StepFeatures:
        """What the scheduler would say of it."""
        return StepFeatures(
            prefill_tokens=self.chunk,
            decodes=self.decodes,
            context_tokens=self.decodes * (self.context + 1),
            prefill_pairs=self.chunk * self.start + self.chunk * (self.chunk + 1) // 2,
        )


# Matrix products of one row, of a few and of many run different kernels, and a step that mixes is
# less than the sum of its parts: one plane is laid through shapes as they come up in service.
_SHAPES = (
    StepShape(1, 16, 0, 0),
    StepShape(8, 16, 0, 0),
    StepShape(8, 256, 0, 0),
    StepShape(24, 16, 0, 0),
    StepShape(0, 0, 16, 0),
    StepShape(0, 0, 96, 0),
    StepShape(0, 0, 32, 448),
    StepShape(8, 64, 32, 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step and the time that it took."""

    features: StepFeatures
    seconds: float


def measure_costs(
    compute: Compute,
    config: LlamaConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    clock: Clock = time.perf_counter,
) -> ExecutorCosts:
    """Time a few steps and copies, in KV memory that is taken for it and given back.

    Rounds over all shapes follow one another, so that what comes and goes on the machine meets
    every shape, and of each shape the fastest counts: what disturbs, like the first use of a
    kernel, of a page or a neighbour's work, can only add.
    """
    shapes = [_within(shape, config.max_context_tokens) for shape in _SHAPES]
    cache = KvCache.allocate(
        config,
        num_blocks=max(_num_blocks(shape, block_size) for shape in shapes),
        num_host_blocks=_NUM_SWAP_BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )
    works = [_work(compute, _rows(shape, block_size), cache) for shape in shapes]
    seconds = _fastest(works, clock)
    steps = [
        MeasuredStep(features=shape.features, seconds=fastest)
        for shape, fastest in zip(shapes, seconds, strict=True)
    ]
    return fit_costs(steps, swap_block_seconds=_swap_block_seconds(cache, clock))


def fit_costs(steps: Sequence[MeasuredStep], *, swap_block_seconds: float) -> ExecutorCosts:
    """Return the costs, none negative, whose sums come closest to the steps' times.

    Closest in squares of relative errors, as `StepTimeModel` learns later: a long step would
    otherwise outweigh all short ones. With five costs the exact way to keep them from being
    negative is to solve for each subset of them, the others 0.
    """
    amounts = np.array([(1, *_columns(step.features)) for step in steps], dtype=np.float64)
    relative = amounts / np.array([[step.seconds] for step in steps])
    best, least = np.zeros(amounts.shape[1]), np.inf
    for kept in _subsets(amounts.shape[1]):
        found = np.zeros(amounts.shape[1])
        found[kept] = np.linalg.lstsq(relative[:, kept], np.ones(len(steps)), rcond=None)[0]
        error = float(np.sum((relative @ found - 1.0) ** 2))
        if error < least and bool(np.all(found >= 0.0)):
            best, least = found, error
    step, token, decode, context, pair = (float(cost) for cost in best)
    return ExecutorCosts(
        step_seconds=step,
        prefill_token_seconds=token,
        decode_seconds=decode,
        context_token_seconds=context,
        prefill_pair_seconds=pair,
        swap_block_seconds=swap_block_seconds,
    )


def _columns(features: StepFeatures) -> tuple[int, int, int, int]:
    return (
        features.prefill_tokens,
        features.decodes,
        features.context_tokens,
        features.prefill_pairs,
    )


def _subsets(count: int) -> list[list[int]]:
    sizes = range(count, 0, -1)
    return [list(kept) for size in sizes for kept in itertools.combinations(range(count), size)]


def _swap_block_seconds(cache: KvCache, clock: Clock) -> float:
    """Return the time of a block, one way: the mean of both."""
    copies = KvCopies(cache)
    blocks = tuple(range(_NUM_SWAP_BLOCKS))
    swap = SwapCopy(0, "", device_blocks=blocks, host_blocks=blocks)

    def there_and_back() -> None:
        copies.swap_out(swap)
        copies.pass_fences(must_wait=True)
        copies.swap_in(swap)
        copies.pass_fences(must_wait=True)

    (seconds,) = _fastest([there_and_back], clock)
    return seconds / (2 * _NUM_SWAP_BLOCKS)


def _within(shape: StepShape, max_context: int) -> StepShape:
    """Return a shape that a model of so few positions can compute."""
    half = max_context // 2
    return StepShape(
        shape.decodes,
        min(shape.context, half),
        min(shape.chunk, half),
        min(shape.start, max_context - min(shape.chunk, half)),
    )


def _num_blocks(shape: StepShape, block_size: int) -> int:
    return shape.decodes * _blocks_for(shape.context + 1, block_size) + _blocks_for(
        shape.start + shape.chunk, block_size
    )


def _rows(shape: StepShape, block_size: int) -> list[PlanRow]:
    """Return a step's rows; each has blocks of its own."""
    blocks = itertools.count()
    places = [(shape.context, 1)] * shape.decodes
    if shape.chunk:
        places.append((shape.start, shape.chunk))
    return [
        PlanRow(
            request_id=str(i),
            start=start,
            token_ids=[0] * count,
            block_ids=list(itertools.islice(blocks, _blocks_for(start + count, block_size))),
            samples=True,
            sampling=SamplingContext(
                params=SamplingParams(temperature=0.0),
                token_ids=[0] * (start + count),
                num_prompt_tokens=start + count,
            ),
            is_decode=i < shape.decodes,
        )
        for i, (start, count) in enumerate(places)
    ]


def _work(compute: Compute, rows: list[PlanRow], cache: KvCache) -> Callable[[], object]:
    return lambda: compute(rows, cache)


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _fastest(works: Sequence[Callable[[], object]], clock: Clock) -> list[float]:
    """Return the least time of each, over several rounds through all of them."""
    began = clock()
    rounds: list[list[float]] = []
    while len(rounds) < _MIN_ROUNDS or (
        len(rounds) < _MAX_ROUNDS and clock() - began < _ENOUGH_SECONDS
    ):
        rounds.append([_timed(work, clock) for work in works])
    return [min(times) for times in zip(*rounds, strict=True)]


def _timed(work: Callable[[], object], clock: Clock) -> float:
    began = clock()
    work()
    return clock() - began
