from dataclasses import replace

import pytest

from tidegate_cli.bench.errors import BenchError
from tidegate_cli.bench.simulation import BUCKETED, CONTINUOUS, STATIC, WAYS, Simulation
from tidegate_cli.traces import TraceRequest
from tidegate_engine.executor.hardware import GPUS, MODELS


@pytest.fixture
def simulation() -> Simulation:
    return Simulation(
        gpu=GPUS["H100-80G"], model=MODELS["Llama-3.1-8B"], max_num_seqs=2, max_batched_tokens=256
    )


def a_trace(*lengths: tuple[int, int], gap: float = 0.0) -> list[TraceRequest]:
    return [
        TraceRequest(at_seconds=gap * n, tenant="", prompt_tokens=prompt, output_tokens=output)
        for n, (prompt, output) in enumerate(lengths)
    ]


def test_all_ways_of_batching_give_the_same_tokens(simulation: Simulation) -> None:
    trace = a_trace((30, 40), (200, 3), (17, 25), (5, 1), (90, 60))

    hashes = {simulation.serve(way, trace, at_once=True).outputs_hash for way in WAYS}

    assert len(hashes) == 1


def test_other_lengths_give_other_tokens(simulation: Simulation) -> None:
    served = [
        simulation.serve(CONTINUOUS, a_trace((30, output)), at_once=True) for output in (4, 5)
    ]

    assert served[0].outputs_hash != served[1].outputs_hash


def test_the_slot_bound_is_what_slots_wait_for_the_longest_output(simulation: Simulation) -> None:
    trace = a_trace((16, 10), (16, 30), (16, 20), (16, 20))

    served = simulation.serve(STATIC, trace, at_once=True)

    assert served.slot_bound == (2 * 30 + 2 * 20) / 80


def test_padding_is_a_share_of_all_computed_tokens(simulation: Simulation) -> None:
    served = simulation.serve(STATIC, a_trace((10, 1), (30, 3)), at_once=True)

    # Prompts of 30 tokens each, then two decodes of each of the two; 20 + 2 of these are padding.
    assert served.padding_share == pytest.approx(22 / 64)
    assert served.decodes_mean == 1.0


def test_without_padding_static_batching_computes_none(simulation: Simulation) -> None:
    served = simulation.serve(STATIC, a_trace((16, 8), (16, 8)), at_once=True)

    assert served.padding_share == 0.0


def test_buckets_save_padding_of_prompts(simulation: Simulation) -> None:
    trace = a_trace((1000, 4), (10, 4), (1000, 4), (10, 4))

    static, bucketed = (simulation.serve(way, trace, at_once=True) for way in (STATIC, BUCKETED))

    assert bucketed.padding_share == 0.0
    assert bucketed.output_tokens_per_s > static.output_tokens_per_s


def test_who_joins_a_running_batch_need_not_wait_for_its_end(simulation: Simulation) -> None:
    trace = a_trace((16, 500), (16, 5), gap=0.5)

    static, continuous = (
        simulation.serve(way, trace, at_once=False) for way in (STATIC, CONTINUOUS)
    )

    assert continuous.ttft_seconds[-1] < 0.1 < static.ttft_seconds[-1]


def test_arrivals_as_recorded_are_waited_for(simulation: Simulation) -> None:
    trace = a_trace((16, 10), (16, 10), gap=9.0)

    served = simulation.serve(CONTINUOUS, trace, at_once=False)

    assert 20 / 10.0 < served.output_tokens_per_s < 20 / 9.0


def test_an_output_that_the_pool_can_not_hold_is_told(simulation: Simulation) -> None:
    one_block = replace(simulation.gpu, memory_bytes=(16.1e9 + 3e6) / 0.9)
    small = replace(simulation, gpu=one_block)

    with pytest.raises(BenchError, match="r0 should have 500 output tokens"):
        small.serve(STATIC, a_trace((4, 500)), at_once=True)
