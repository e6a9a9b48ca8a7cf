import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidegate_engine.core.lengths import BASE_QUANTILE, PESSIMISTIC_QUANTILE, LengthEstimator

LIMIT = 4096
LENGTHS = st.integers(0, 5000)


def estimator_of(lengths: Iterable[int], tenant: str = "shop") -> LengthEstimator:
    lengths_seen = LengthEstimator()
    for length in lengths:
        lengths_seen.observe(tenant, length)
    return lengths_seen


def test_without_samples_a_request_is_expected_to_produce_all_that_it_may() -> None:
    assert LengthEstimator().predict("shop", 10, LIMIT) == LIMIT - 10


def test_fifteen_samples_are_too_few_and_sixteen_are_enough() -> None:
    lengths = estimator_of([20] * 15)
    assert lengths.predict("shop", 0, LIMIT) == LIMIT
    lengths.observe("shop", 20)
    assert lengths.predict("shop", 0, LIMIT) == 20


def test_a_tenant_with_few_samples_is_predicted_as_the_pool_is() -> None:
    lengths = estimator_of([20] * 64)
    for _ in range(15):
        lengths.observe("lab", 50)
    assert lengths.predict("lab", 0, LIMIT) == 20
    lengths.observe("lab", 50)
    assert lengths.predict("lab", 0, LIMIT) == 50
    assert lengths.predict("shop", 0, LIMIT) == 20


def test_a_tenant_counts_from_its_sixteenth_request_on_whatever_others_do_between() -> None:
    lengths = estimator_of([20] * 35)
    for _ in range(16):
        lengths.observe("lab", 50)
    assert lengths.predict("lab", 0, LIMIT) == 50


def test_the_quantile_is_taken_among_longer_requests_only() -> None:
    lengths = estimator_of([5] * 90 + [40] * 6 + [60] * 4 + [5] * 4)
    assert lengths.predict("shop", 0, LIMIT) == 5
    assert lengths.predict("shop", 4, LIMIT) == 1
    assert lengths.predict("shop", 5, LIMIT) == 55  # six of ten are within 40: not seven
    assert lengths.predict("shop", 40, LIMIT) == 20


def test_beyond_all_of_its_tenant_a_request_is_predicted_by_the_pool_and_then_by_its_limit() -> (
    None
):
    lengths = estimator_of([10] * 16)
    for _ in range(16):
        lengths.observe("lab", 30)
    assert lengths.predict("shop", 10, LIMIT) == 20
    assert lengths.predict("shop", 30, LIMIT) == LIMIT - 30


def test_a_long_length_is_never_predicted_shorter_nor_by_more_than_four_percent_longer() -> None:
    for length in (64, 65, 100, 1000, 12345, 100_000):
        predicted = estimator_of([length] * 16).predict("shop", 0, 1 << 21)
        assert length <= predicted <= length * 1.04


def test_lengths_beyond_the_last_bin_count_as_its_edge() -> None:
    assert estimator_of([1 << 22] * 16).predict("shop", 0, 1 << 21) == 1 << 20


@given(st.lists(LENGTHS, max_size=80), st.integers(0, 5000), st.integers(0, 5000))
def test_predictions_stay_within_what_a_request_may_still_produce(
    seen: list[int], generated: int, at_most: int
) -> None:
    predicted = estimator_of(seen).predict("shop", generated, at_most)
    if at_most > generated:
        assert 1 <= predicted <= at_most - generated
    else:
        assert predicted == 0


@given(st.lists(st.integers(1, 64), min_size=16, max_size=96), st.integers(0, 63))
def test_up_to_64_tokens_the_prediction_is_the_exact_conditional_quantile(
    seen: list[int], generated: int
) -> None:
    seen = seen[: len(seen) // 16 * 16]
    longer = sorted(length for length in seen if length > generated)
    predicted = estimator_of(seen).predict("shop", generated, LIMIT)
    if not longer:
        assert predicted == LIMIT - generated
        return
    total = generated + predicted
    assert sum(length <= total for length in longer) >= BASE_QUANTILE * len(longer)
    assert sum(length < total for length in longer) < BASE_QUANTILE * len(longer)


@pytest.mark.parametrize("generated", [0, 100, 600])
@pytest.mark.parametrize("shape", ["exponential", "log-normal"])
def test_predictions_of_many_requests_add_up_to_about_what_comes(
    shape: str, generated: int
) -> None:
    rng = random.Random(3)

    def draw() -> int:
        drawn = rng.expovariate(1 / 300) if shape == "exponential" else rng.lognormvariate(5.2, 1)
        return 1 + int(drawn)

    lengths = estimator_of(draw() for _ in range(1000))
    to_come = [length - generated for length in (draw() for _ in range(4000)) if length > generated]
    predicted = len(to_come) * lengths.predict("shop", generated, 100_000)
    assert 0.9 < predicted / sum(to_come) < 1.5


def test_the_window_forgets_what_is_older_than_a_thousand_requests() -> None:
    lengths = estimator_of([1000] * 1000 + [10] * 1000)
    assert lengths.predict("shop", 0, LIMIT) == 10
    assert lengths.predict("shop", 10, LIMIT) == LIMIT - 10


def test_preemptions_raise_predictions_and_finished_requests_lower_them_again() -> None:
    ramp = list(range(1, 65))
    lengths = estimator_of(ramp)
    calm = lengths.predict("shop", 0, LIMIT)
    lengths.note_preemption()
    alarmed = lengths.predict("shop", 0, LIMIT)
    for _ in range(20):
        lengths.note_preemption()
    most_alarmed = lengths.predict("shop", 0, LIMIT)
    assert calm == -int(-64 * BASE_QUANTILE // 1)
    assert calm < alarmed < most_alarmed == -int(-64 * PESSIMISTIC_QUANTILE // 1)
    for length in ramp * 4:
        lengths.observe("shop", length)
    assert lengths.predict("shop", 0, LIMIT) == calm


def test_a_forgotten_tenant_starts_as_the_pool() -> None:
    lengths = estimator_of([10] * 48)
    for _ in range(16):
        lengths.observe("lab", 60)
    lengths.forget("lab")
    assert lengths.predict("lab", 0, LIMIT) == 10
    assert lengths.predict("lab", 10, LIMIT) == 50  # the pool remembers


def test_the_version_grows_with_every_eighth_finished_request_and_each_preemption() -> None:
    lengths = LengthEstimator()
    versions = []
    for _ in range(16):
        lengths.observe("shop", 10)
        versions.append(lengths.version)
    assert versions == [0] * 7 + [1] * 8 + [2]
    lengths.note_preemption()
    assert lengths.version == 3
    lengths.forget("nobody")
    assert lengths.version == 3
    lengths.forget("shop")
    assert lengths.version == 4


class LengthEstimatorMachine(RuleBasedStateMachine):
    """Whatever happens, predictions change with the version only, and the tables add up."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = LengthEstimator()
        self.seen: tuple[int, list[int]] | None = None

    tenants = st.sampled_from(["shop", "lab", "shed"])

    @rule(tenant=tenants, lengths=st.lists(LENGTHS, max_size=40))
    def finish(self, tenant: str, lengths: list[int]) -> None:
        for length in lengths:
            self.lengths.observe(tenant, length)
            self.predictions_hold_still_within_a_version()

    @rule()
    def preempt(self) -> None:
        self.lengths.note_preemption()

    @rule(tenant=tenants)
    def forget(self, tenant: str) -> None:
        self.lengths.forget(tenant)

    @invariant()
    def predictions_hold_still_within_a_version(self) -> None:
        predicted = [
            self.lengths.predict(tenant, generated, LIMIT)
            for tenant in ("shop", "lab", "shed")
            for generated in (0, 30, 400)
        ]
        if self.seen is not None and self.seen[0] == self.lengths.version:
            assert self.seen[1] == predicted
        self.seen = (self.lengths.version, predicted)

    @invariant()
    def tables_add_up(self) -> None:
        self.lengths.check_invariants()


TestLengthEstimator = LengthEstimatorMachine.TestCase
TestLengthEstimator.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_the_check_finds_a_sample_that_is_not_counted() -> None:
    lengths = estimator_of([10] * 16)
    lengths._tenants["shop"].bins.append(3)
    with pytest.raises(AssertionError, match="histogram of shop"):
        lengths.check_invariants()
