"""Costs from steps whose true costs are known: a clock runs on by them."""

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import PlanRow, SampledToken
from tidegate_engine.core.step_time import StepFeatures, StepTimeModel
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.measuring import MeasuredStep, fit_costs, measure_costs
from tidegate_testing.models import TINY

TRUE = ExecutorCosts(
    step_seconds=0.020,
    prefill_token_seconds=0.0010,
    decode_seconds=0.0020,
    context_token_seconds=0.00001,
    prefill_pair_seconds=0.000001,
)
STEPS = (
    StepFeatures(prefill_tokens=0, decodes=16, context_tokens=16 * 300, prefill_pairs=0),
    StepFeatures(prefill_tokens=200, decodes=0, context_tokens=0, prefill_pairs=200 * 201 // 2),
    StepFeatures(prefill_tokens=64, decodes=4, context_tokens=400, prefill_pairs=64 * 500),
)


def features_of(rows: Sequence[PlanRow]) -> StepFeatures:
    decodes = [row for row in rows if row.is_decode]
    chunks = [row for row in rows if not row.is_decode]
    return StepFeatures(
        prefill_tokens=sum(len(row.token_ids) for row in chunks),
        decodes=len(decodes),
        context_tokens=sum(row.end for row in decodes),
        prefill_pairs=sum(position + 1 for row in chunks for position in range(row.start, row.end)),
    )


class Machine:
    """Computes nothing, and has a clock on which that takes what `TRUE` says.

    `disturb` stretches steps, by their number.
    """

    def __init__(self, disturb: Callable[[int], float] = lambda _: 1.0) -> None:
        self.now = 0.0
        self.steps = 0
        self.longest = 0
        self._disturb = disturb

    def compute(self, rows: Sequence[PlanRow], cache: KvCache) -> Mapping[str, SampledToken]:
        blocks = [block for row in rows for block in row.block_ids]
        assert len(blocks) == len({*blocks}) <= cache.num_blocks
        assert all(row.end <= len(row.block_ids) * cache.block_size for row in rows)
        self.longest = max(self.longest, *(row.end for row in rows))
        seconds = StepTimeModel(TRUE).predict(features_of(rows))
        self.now += seconds * self._disturb(self.steps)
        self.steps += 1
        return {}

    def measure(self, max_context_tokens: int = 4096) -> ExecutorCosts:
        return measure_costs(
            self.compute,
            dataclasses.replace(TINY, max_context_tokens=max_context_tokens),
            block_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
            clock=lambda: self.now,
        )


def largest_error(costs: ExecutorCosts) -> float:
    """Of the predicted times of a few steps, relative to the true ones."""
    found, true = StepTimeModel(costs), StepTimeModel(TRUE)
    return max(abs(found.predict(step) / true.predict(step) - 1.0) for step in STEPS)


def test_the_costs_of_an_affine_machine_are_found() -> None:
    costs = dataclasses.asdict(Machine().measure())
    expected = dataclasses.asdict(TRUE)
    assert costs.pop("swap_block_seconds") == 0.0  # on this clock copies take no time
    del expected["swap_block_seconds"]
    assert costs == pytest.approx(expected, rel=1e-6)


def test_a_slow_first_round_does_not_count() -> None:
    machine = Machine(lambda step: 30.0 if step < 8 else 1.0)
    assert largest_error(machine.measure()) < 1e-6


def test_noise_of_a_tenth_moves_predictions_by_little() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        machine = Machine(lambda _, draw=draw: 1.0 + draw.uniform(0.0, 0.1))  # type: ignore[misc]
        assert largest_error(machine.measure()) < 0.12


def test_steps_that_take_long_are_repeated_less_often() -> None:
    quick, slow = Machine(lambda _: 0.01), Machine(lambda _: 10.0)
    quick.measure()
    slow.measure()
    assert slow.steps == 2 * 8
    assert quick.steps > slow.steps


def test_a_model_of_few_positions_is_measured_within_them() -> None:
    machine = Machine()
    assert largest_error(machine.measure(max_context_tokens=64)) < 0.05
    assert machine.longest <= 64


def test_a_cost_that_noise_makes_negative_is_nothing() -> None:
    steps = [
        MeasuredStep(features=StepFeatures(0, decodes, context, 0), seconds=seconds)
        for decodes, context, seconds in ((1, 1, 0.02), (8, 8, 0.03), (8, 2000, 0.029))
    ]
    costs = fit_costs(steps, swap_block_seconds=0.5)
    assert costs.context_token_seconds == 0.0
    assert costs.step_seconds > 0.0
    assert costs.decode_seconds > 0.0
    assert costs.swap_block_seconds == 0.5
