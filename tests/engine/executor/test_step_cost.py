import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import BlockCopy, PlanRow, StepPlan
from tidegate_engine.executor.hardware import (
    A100_80G,
    CPU_2_CORES,
    GPUS,
    H100_80G,
    H200,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B_TP8,
    SMOLLM2_135M,
    Gpu,
    ModelShape,
)
from tidegate_engine.executor.step_cost import AffineCost, Roofline, fit_gpu
from tidegate_testing.sampling import a_context

COSTS = ExecutorCosts(
    step_seconds=100,
    prefill_token_seconds=10,
    decode_seconds=1,
    context_token_seconds=0.5,
    prefill_pair_seconds=0.25,
    swap_block_seconds=7,
)


def chunk(tokens: int, start: int = 0, *, samples: bool = False) -> PlanRow:
    return PlanRow("c", start, range(tokens), (), samples=samples, sampling=a_context())


def decode(context: int) -> PlanRow:
    row = PlanRow("d", context - 1, [1], (), samples=True, sampling=a_context())
    return row._replace(is_decode=True)


def plan(*rows: PlanRow, copies: Sequence[BlockCopy] = ()) -> StepPlan:
    return StepPlan(step=1, revision=1, rows=rows, copies=tuple(copies))


def roofline(gpu: Gpu = H100_80G, model: ModelShape = LLAMA_3_1_8B) -> Roofline:
    return Roofline(gpu=gpu, model=model)


# -- affine ----------------------------------------------------------------------------------------


def test_an_affine_step_costs_the_sum_of_its_parts() -> None:
    # Pairs with tokens before: 0 + 1 + 2 in the first chunk, 5 + 6 in the second.
    step = plan(decode(5), decode(1), chunk(3), chunk(2, start=5))
    expected = 100 + 5 * 10 + 2 * 1 + (5 + 1) * 0.5 + (3 + 11) * 0.25
    assert AffineCost(COSTS).seconds(step) == expected
    assert AffineCost(COSTS).costs is COSTS


# -- roofline --------------------------------------------------------------------------------------


def test_a_few_decodes_wait_for_the_weights() -> None:
    # 15 GB of layers and output projection at 80 % of 3.35 TB/s.
    read = (6_979_588_096 + 128_256 * 4096) * 2 / (0.8 * 3.35e12)
    assert roofline().seconds(plan(decode(1))) == pytest.approx(0.001 + read, rel=1e-4)
    assert roofline().seconds(plan(*[decode(1)] * 8)) == pytest.approx(0.001 + read, rel=1e-3)


def test_decodes_with_long_contexts_wait_for_these_too() -> None:
    short, long = (roofline().seconds(plan(*[decode(n)] * 64)) for n in (1, 8001))
    kv = 64 * 8000 * 2 * 32 * 8 * 128 * 2
    assert long - short == pytest.approx(kv / (0.8 * 3.35e12))


def test_a_long_prompt_waits_for_the_computing() -> None:
    tokens, start = 2048, 8192
    flops: float = 2 * 6_979_588_096 * tokens
    flops += 4 * 32 * 32 * 128 * (tokens * start + tokens * (tokens + 1) / 2)
    expected = 0.001 + flops / (0.55 * 989.4e12)
    assert roofline().seconds(plan(chunk(tokens, start))) == pytest.approx(expected)


def test_only_sampled_positions_are_projected_to_the_vocabulary() -> None:
    silent, sampling = (
        roofline().seconds(plan(chunk(2048, samples=samples))) for samples in (False, True)
    )
    assert sampling - silent == pytest.approx(2 * 128_256 * 4096 / (0.55 * 989.4e12))


def test_a_copy_on_write_reads_and_writes_a_block() -> None:
    without, with_copies = (
        roofline().seconds(plan(decode(1), copies=[BlockCopy(1, 2)] * n)) for n in (0, 100)
    )
    assert with_copies - without == pytest.approx(100 * 2 * 2**21 / (0.8 * 3.35e12))


def test_padding_takes_as_long_as_what_it_stands_for() -> None:
    real = decode(4000)
    padding = real._replace(is_padding=True)
    for cost in (roofline(), AffineCost(COSTS)):
        assert cost.seconds(plan(real, padding)) == cost.seconds(plan(real, real))


def test_eight_gpus_share_the_work_and_pay_for_all_reduces() -> None:
    alone = dataclasses.replace(LLAMA_3_1_70B_TP8, tensor_parallel=1)
    step = plan(chunk(2048))
    one, eight = (
        roofline(model=model).seconds(step) - 0.001 for model in (alone, LLAMA_3_1_70B_TP8)
    )
    passed = 2 * 7 / 8 * 2048 * 8192 * 2
    reduces = 160 * (8e-6 + passed / (0.8 * 450e9))
    assert eight == pytest.approx(one / 8 + reduces)


def test_faster_gpus_are_faster() -> None:
    for step in (plan(decode(500)), plan(chunk(4096)), plan(*[decode(4000)] * 32, chunk(256))):
        times = [roofline(gpu).seconds(step) for gpu in (CPU_2_CORES, A100_80G, H100_80G, H200)]
        assert times == sorted(times, reverse=True)
        assert times[0] > 10 * times[1]


rows = st.one_of(
    st.builds(decode, st.integers(1, 16_000)),
    st.builds(chunk, st.integers(64, 2048), st.integers(0, 4000), samples=st.booleans()),
)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("model", [LLAMA_3_1_8B, LLAMA_3_1_70B_TP8])
@given(step=st.builds(plan, rows, rows, rows, rows))
def test_the_sum_of_parts_is_the_roofline_without_overlap(
    gpu: Gpu, model: ModelShape, step: StepPlan
) -> None:
    cost = roofline(gpu, model)
    exact, parts = cost.seconds(step), AffineCost(cost.costs).seconds(step)
    assert 0.9 * exact <= parts <= 2.1 * exact


def test_a_swap_takes_its_bytes_over_the_bus() -> None:
    assert roofline().costs.swap_block_seconds == pytest.approx(2**21 / (0.8 * 64e9))
    # Each of eight GPUs moves an eighth.
    of_70b = roofline(model=LLAMA_3_1_70B_TP8).costs.swap_block_seconds
    assert of_70b == pytest.approx(80 * 2 * 128 * 2 * 16 / (0.8 * 64e9))


# -- fitted ----------------------------------------------------------------------------------------


def fitted(costs: ExecutorCosts) -> Gpu:
    return fit_gpu("this", costs, SMOLLM2_135M, block_size=16, memory_bytes=8e9)


def test_fitting_finds_the_machine_again() -> None:
    machine = dataclasses.replace(CPU_2_CORES, name="this")
    again = fitted(roofline(machine, SMOLLM2_135M).costs)
    for field in ("flops_per_second", "memory_bytes_per_second", "host_bytes_per_second"):
        assert getattr(again, field) == pytest.approx(getattr(machine, field), rel=0.05)
    assert again.step_overhead_seconds == pytest.approx(machine.step_overhead_seconds, rel=0.2)


def test_a_fitted_machine_computes_its_model_as_it_was_measured() -> None:
    measured = ExecutorCosts(
        step_seconds=0.070,
        prefill_token_seconds=0.0015,
        decode_seconds=0.0018,
        context_token_seconds=6e-6,
        prefill_pair_seconds=5e-7,
        swap_block_seconds=1e-4,
    )
    again = roofline(fitted(measured), SMOLLM2_135M).costs
    assert again.step_seconds == pytest.approx(measured.step_seconds)
    assert again.swap_block_seconds == pytest.approx(measured.swap_block_seconds)
    assert again.context_token_seconds == pytest.approx(measured.context_token_seconds, rel=0.01)
    assert again.prefill_token_seconds == pytest.approx(measured.prefill_token_seconds, rel=0.01)
    assert again.decode_seconds == pytest.approx(measured.decode_seconds, rel=0.2)


def test_costs_lost_in_noise_still_make_a_machine() -> None:
    nothing = ExecutorCosts(
        step_seconds=0.070, prefill_token_seconds=0.001, decode_seconds=0.0, swap_block_seconds=0.0
    )
    gpu = fitted(nothing)
    assert gpu.step_overhead_seconds == pytest.approx(0.0)
    assert roofline(gpu, SMOLLM2_135M).seconds(plan(decode(100))) > 0.070
    assert roofline(gpu, SMOLLM2_135M).costs.swap_block_seconds == 0
