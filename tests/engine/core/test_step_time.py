import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.step_time import UNBOUNDED_TOKENS, StepFeatures, StepTimeModel

TRUTH = ExecutorCosts(
    step_seconds=0.006,
    prefill_token_seconds=3e-5,
    decode_seconds=5e-5,
    context_token_seconds=3e-8,
    prefill_pair_seconds=1e-9,
    swap_block_seconds=0.0003,
)
SMALL_STEP = StepFeatures(100, 10, 5_000, 30_000)


def affine_seconds(costs: ExecutorCosts, step: StepFeatures) -> float:
    return (
        costs.step_seconds
        + costs.prefill_token_seconds * step.prefill_tokens
        + costs.decode_seconds * step.decodes
        + costs.context_token_seconds * step.context_tokens
        + costs.prefill_pair_seconds * step.prefill_pairs
    )


def varied_step(rng: random.Random) -> StepFeatures:
    tokens, start, decodes = rng.randrange(0, 1500), rng.randrange(0, 4000), rng.randrange(1, 256)
    return StepFeatures(
        tokens, decodes, decodes * rng.randrange(50, 2000), int(tokens * (start + tokens / 2))
    )


def decode_step(rng: random.Random) -> StepFeatures:
    return varied_step(rng)._replace(prefill_tokens=0, prefill_pairs=0)


def scaled(costs: ExecutorCosts, factor: float) -> ExecutorCosts:
    return ExecutorCosts(**{name: value * factor for name, value in asdict(costs).items()})


def train(
    model: StepTimeModel,
    rng: random.Random,
    *,
    steps: int,
    draw: Callable[[random.Random], StepFeatures] = varied_step,
    costs: ExecutorCosts = TRUTH,
    noise: float = 0.0,
) -> None:
    for _ in range(steps):
        step = draw(rng)
        model.observe(step, affine_seconds(costs, step) * (1 + rng.gauss(0, noise)))


def worst_error(model: StepTimeModel, rng: random.Random, costs: ExecutorCosts = TRUTH) -> float:
    steps = [varied_step(rng) for _ in range(200)]
    return max(abs(model.predict(step) / affine_seconds(costs, step) - 1) for step in steps)


@dataclass
class Roofline:
    """A device whose step takes the longer of computing and reading memory: not affine."""

    overhead_seconds: float
    weights_seconds: float
    token_seconds: float
    pair_seconds: float
    context_seconds: float
    noise: float = 0.03

    def seconds(self, step: StepFeatures, rng: random.Random) -> float:
        tokens = step.prefill_tokens + step.decodes
        compute = tokens * self.token_seconds + step.prefill_pairs * self.pair_seconds
        memory = self.weights_seconds + step.context_tokens * self.context_seconds
        return (self.overhead_seconds + max(compute, memory)) * (1 + rng.gauss(0, self.noise))

    def costs(self) -> ExecutorCosts:
        return ExecutorCosts(
            step_seconds=self.overhead_seconds + self.weights_seconds,
            prefill_token_seconds=self.token_seconds,
            decode_seconds=self.token_seconds,
            context_token_seconds=self.context_seconds,
            prefill_pair_seconds=self.pair_seconds,
        )


FAST = Roofline(0.002, 0.0045, 3.2e-5, 2e-10, 2.7e-8)
HEAVY = Roofline(0.003, 0.015, 3e-5, 2e-9, 2.7e-8)
SLOW = Roofline(0.001, 0.02, 0.002, 1e-7, 1e-6)


@dataclass
class Served:
    """What became of the target in the steps whose prefill the model had to bound.

    `used` holds the time of each such step as a share of the target, after the warm-up, where the
    decodes alone don't take all of it.
    """

    used: list[float] = field(default_factory=list)

    @property
    def share_over(self) -> float:
        return sum(share > 1 for share in self.used) / len(self.used)

    @property
    def mean_used(self) -> float:
        return sum(self.used) / len(self.used)


def serve(
    device: Roofline,
    model: StepTimeModel,
    *,
    target: float,
    offered: Callable[[random.Random, int], int],
    steps: int,
    seed: int,
) -> Served:
    rng = random.Random(seed)
    served = Served()
    decodes, context_each, start = 64, 800, 0
    for number in range(steps):
        decodes = min(256, max(1, decodes + rng.choice((-8, -2, -1, 0, 1, 2, 8))))
        context_each = min(3000, max(10, context_each + rng.randrange(-20, 21)))
        context = decodes * context_each
        budget = model.prefill_budget(
            target_seconds=target, decodes=decodes, context_tokens=context, start=start
        )
        tokens = min(max(budget, 1), offered(rng, number))
        step = StepFeatures(tokens, decodes, context, int(tokens * (start + tokens / 2)))
        seconds = device.seconds(step, rng)
        model.observe(step, seconds)
        alone = device.seconds(step._replace(prefill_tokens=0, prefill_pairs=0), rng)
        if number >= 200 and tokens == max(budget, 1) and alone < 0.9 * target:
            served.used.append(seconds / target)
        start = start + tokens if start < 8000 and rng.random() < 0.9 else 0
    return served


def plentiful(_rng: random.Random, _number: int) -> int:
    return 1 << 30


def in_phases(rng: random.Random, number: int) -> int:
    """No prompts, short ones and long ones, 150 steps of each."""
    return (0, rng.choice((0, 0, 20, 60, 200)), 1 << 30)[number // 150 % 3]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("device", "target"), [(FAST, 0.015), (FAST, 0.05), (HEAVY, 0.05), (SLOW, 1.0)]
)
def test_on_a_roofline_budgets_keep_99_percent_of_steps_in_the_target_and_use_it(
    device: Roofline, target: float, seed: int
) -> None:
    model = StepTimeModel(device.costs())
    served = serve(device, model, target=target, offered=plentiful, steps=2000, seed=seed)
    assert served.share_over <= 0.01
    assert served.mean_used >= 0.7


@pytest.mark.parametrize("device", [FAST, HEAVY])
def test_long_prompts_after_phases_without_any_keep_99_percent_of_steps_in_the_target(
    device: Roofline,
) -> None:
    model = StepTimeModel(device.costs())
    served = serve(device, model, target=0.05, offered=in_phases, steps=9000, seed=1)
    assert served.share_over <= 0.01
    assert served.mean_used >= 0.7


def test_a_prior_three_times_off_is_learnt_away_while_serving() -> None:
    for factor in (1 / 3, 3):
        model = StepTimeModel(scaled(FAST.costs(), factor))
        served = serve(FAST, model, target=0.05, offered=plentiful, steps=3000, seed=1)
        assert served.share_over <= 0.01
        assert served.mean_used >= 0.7


def test_the_prior_is_what_is_predicted_first() -> None:
    model = StepTimeModel(TRUTH)
    assert model.costs == TRUTH
    assert model.predict(SMALL_STEP) == pytest.approx(affine_seconds(TRUTH, SMALL_STEP))


@pytest.mark.parametrize("prior", [ExecutorCosts(), scaled(TRUTH, 0.1), scaled(TRUTH, 0)])
def test_an_affine_truth_is_learnt_from_any_prior(prior: ExecutorCosts) -> None:
    rng = random.Random(5)
    model = StepTimeModel(prior)
    train(model, rng, steps=1500)
    assert worst_error(model, rng) < 0.02
    assert model.costs.swap_block_seconds == prior.swap_block_seconds


def test_noise_averages_out() -> None:
    rng = random.Random(6)
    model = StepTimeModel(TRUTH)
    train(model, rng, steps=2000, noise=0.05)
    assert worst_error(model, rng) < 0.05


def test_a_change_of_the_device_is_followed() -> None:
    rng = random.Random(7)
    model = StepTimeModel(TRUTH)
    train(model, rng, steps=500)
    slower = scaled(TRUTH, 1.5)
    train(model, rng, steps=1500, costs=slower)
    assert worst_error(model, rng, slower) < 0.02


@pytest.mark.parametrize("factor", [0.001, 10, 1000])
def test_an_outlier_hardly_moves_the_model(factor: float) -> None:
    rng = random.Random(8)
    model = StepTimeModel(TRUTH)
    train(model, rng, steps=300)
    step = varied_step(rng)
    model.observe(step, affine_seconds(TRUTH, step) * factor)
    assert worst_error(model, rng) < 0.05


def test_regular_pauses_hardly_move_the_model() -> None:
    rng = random.Random(9)
    model = StepTimeModel(TRUTH)
    for _ in range(30):
        train(model, rng, steps=50)
        step = varied_step(rng)
        model.observe(step, affine_seconds(TRUTH, step) * 10)
    assert worst_error(model, rng) < 0.05
    assert model.margin == pytest.approx(0.06, abs=0.02)


@pytest.mark.parametrize("seconds", [nan, inf, -inf, 0.0, -1.0])
def test_a_time_that_is_none_is_ignored(seconds: float) -> None:
    model, twin = StepTimeModel(TRUTH), StepTimeModel(TRUTH)
    model.observe(SMALL_STEP, seconds)
    assert (model.costs, model.margin) == (TRUTH, twin.margin)
    model.observe(SMALL_STEP, 0.02)
    twin.observe(SMALL_STEP, 0.02)
    assert model.costs == twin.costs


def test_a_step_that_computed_nothing_is_ignored() -> None:
    model = StepTimeModel(TRUTH)
    for _ in range(20):
        model.observe(StepFeatures(0, 0, 0, 0), 0.5)
    assert (model.costs, model.margin) == (TRUTH, StepTimeModel(TRUTH).margin)


def test_of_decode_only_steps_every_eighth_is_learnt_from() -> None:
    rng = random.Random(10)
    model = StepTimeModel(ExecutorCosts())
    train(model, rng, steps=7, draw=decode_step)
    assert model.costs == ExecutorCosts()
    train(model, rng, steps=1, draw=decode_step)
    assert model.costs != ExecutorCosts()


def test_what_prefill_costs_is_remembered_through_a_long_time_of_decodes() -> None:
    rng = random.Random(11)
    model = StepTimeModel(scaled(TRUTH, 0.5))
    train(model, rng, steps=1500)
    train(model, rng, steps=20_000, draw=decode_step, noise=0.05)
    assert model.costs.prefill_token_seconds == pytest.approx(3e-5, rel=0.1)
    assert worst_error(model, rng) < 0.1


def test_what_hasnt_been_seen_for_an_hour_of_steps_is_still_remembered() -> None:
    rng = random.Random(13)
    model = StepTimeModel(TRUTH)
    steps = [varied_step(rng)._replace(decodes=0, context_tokens=0) for _ in range(100)]
    steps = [step for step in steps if step.prefill_tokens]
    for number in range(80_000):  # by then all that the sums keep of decodes has underflowed
        step = steps[number % len(steps)]
        model.observe(step, affine_seconds(TRUTH, step))
    assert model.costs.decode_seconds == pytest.approx(TRUTH.decode_seconds, rel=0.01)
    assert model.costs.context_token_seconds == pytest.approx(TRUTH.context_token_seconds, rel=0.01)


def test_short_prompts_in_steps_bound_by_memory_do_not_teach_that_prefill_is_free() -> None:
    rng = random.Random(12)
    model = StepTimeModel(TRUTH)
    for _ in range(2000):
        model.observe(StepFeatures(rng.randrange(1, 60), 20, 20_000, 900), 0.02)
    floor = TRUTH.prefill_token_seconds / 4
    assert floor <= model.costs.prefill_token_seconds < 2 * floor


any_step = st.builds(
    StepFeatures,
    st.integers(0, 100_000),
    st.integers(0, 4096),
    st.integers(0, 10**8),
    st.integers(0, 10**10),
)
any_seconds = st.floats(1e-300, 1e300) | st.sampled_from([nan, inf, 0.0, -1.0])


@given(st.lists(st.tuples(any_step, any_seconds), max_size=60), st.sampled_from([0.0, 1.0]))
def test_coefficients_stay_finite_and_never_negative(
    steps: list[tuple[StepFeatures, float]], factor: float
) -> None:
    model = StepTimeModel(scaled(TRUTH, factor))
    for step, seconds in steps:
        model.observe(step, seconds)
        assert all(0 <= value < inf for value in asdict(model.costs).values())
        assert 0.05 <= model.margin <= 0.5


def test_an_impossibly_short_step_is_forgotten_even_where_no_cost_was_known() -> None:
    rng = random.Random(14)
    model = StepTimeModel(scaled(TRUTH, 0))
    model.observe(SMALL_STEP, 1e-300)
    train(model, rng, steps=3000)
    assert worst_error(model, rng) < 0.02


def test_the_margin_grows_with_a_step_beyond_it_and_shrinks_slowly_otherwise() -> None:
    model = StepTimeModel(TRUTH)
    margins = [model.margin]
    for factor in (1.0, 1.9, 1.0):
        model.observe(SMALL_STEP, model.predict(SMALL_STEP) * factor)
        margins.append(model.margin)
    steps = [after - before for before, after in pairwise(margins)]
    assert steps == pytest.approx([-0.02 / 199, 0.02, -0.02 / 199])


def test_the_margin_keeps_within_its_limits() -> None:
    model = StepTimeModel(TRUTH)
    for _ in range(5000):
        model.observe(SMALL_STEP, model.predict(SMALL_STEP))
    assert model.margin == 0.05
    for _ in range(100):
        model.observe(SMALL_STEP, model.predict(SMALL_STEP) * 1.99)
    assert model.margin == pytest.approx(0.5, abs=0.02)


def test_a_step_that_no_margin_would_have_held_leaves_the_margin_alone() -> None:
    model = StepTimeModel(TRUTH)
    before = model.margin
    model.observe(SMALL_STEP, model.predict(SMALL_STEP) * 2.1)
    assert model.margin == before


def test_steps_without_prefill_leave_the_margin_alone() -> None:
    model = StepTimeModel(TRUTH)
    before = model.margin
    for factor in (1.0, 1.9):
        for _ in range(8):
            step = SMALL_STEP._replace(prefill_tokens=0, prefill_pairs=0)
            model.observe(step, model.predict(step) * factor)
    assert model.margin == before


budgets = st.tuples(
    st.floats(0.001, 2.0), st.integers(0, 256), st.integers(0, 500_000), st.integers(0, 100_000)
)


@pytest.mark.parametrize("pair_seconds", [0.0, 1e-9, 1e-6])
@given(budgets)
def test_a_budget_is_the_most_tokens_that_are_predicted_within_the_target(
    pair_seconds: float, asked: tuple[float, int, int, int]
) -> None:
    target, decodes, context, start = asked
    costs = replace(TRUTH, prefill_pair_seconds=pair_seconds)
    model = StepTimeModel(costs)
    budget = model.prefill_budget(
        target_seconds=target, decodes=decodes, context_tokens=context, start=start
    )

    def seconds(tokens: int) -> float:
        pairs = int(tokens * (start + tokens / 2))
        return affine_seconds(costs, StepFeatures(tokens, decodes, context, pairs))

    allowed = target * (1 - model.margin)
    assert seconds(budget + 1) > allowed * (1 - 1e-9) - pair_seconds
    assert budget == 0 or seconds(budget) <= allowed * (1 + 1e-9)


def test_where_prompt_tokens_cost_nothing_the_budget_is_unbounded() -> None:
    costs = replace(TRUTH, prefill_token_seconds=0.0, prefill_pair_seconds=0.0)
    model = StepTimeModel(costs)
    asked = {"decodes": 1, "context_tokens": 10, "start": 0}
    assert model.prefill_budget(target_seconds=0.05, **asked) == UNBOUNDED_TOKENS
    assert model.prefill_budget(target_seconds=0.001, **asked) == 0
