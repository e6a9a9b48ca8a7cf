"""Whatever the scheduler does to a request, and beside whom, its output is what it has alone."""

from collections.abc import Callable, Iterable
from itertools import product

import pytest

from tidegate_engine.core.request import Request
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.core.sequence import Phase
from tidegate_policies.rules import PreemptionMode, PreemptionRule
from tidegate_policies.snapshot import PolicySnapshot
from tidegate_testing.devices import ON_CUDA
from tidegate_testing.executors import BLOCK_SIZE
from tidegate_testing.lab import GREEDY, SEEDED, Lab, a_load, some_tokens
from tidegate_testing.policies import a_tenant
from tidegate_testing.scheduling import a_request
from tidegate_testing.simulation import Simulation, admitting_by_present_need

PROMPT = some_tokens(0, 17)
# On a CPU a copy has ended with its step; on other devices it takes some.
LATE_BY = (0, 3)
CHUNKS = (64, 7)
SAMPLINGS = (GREEDY, SEEDED)
MODES = (PreemptionMode.RECOMPUTE, PreemptionMode.SWAP)


def each_of(**choices: Iterable[object]) -> pytest.MarkDecorator:
    """All combinations on the executors that are fast; the last one with SmolLM2, and on CUDA."""
    combinations = [*product(*choices.values())]
    cases = [
        *(pytest.param("simulated", *each) for each in combinations),
        *(pytest.param("torch", *each) for each in combinations),
        pytest.param("torch-cuda", *combinations[-1], marks=ON_CUDA),
        pytest.param("smollm2", *combinations[-1], marks=pytest.mark.model),
    ]
    return pytest.mark.parametrize(("executor", *choices), cases, indirect=["executor"])


def gold_above_batch(mode: PreemptionMode = PreemptionMode.SWAP) -> PolicySnapshot:
    rule = PreemptionRule(mode=mode, min_quantum_tokens=2, max_preemptions=10)
    return admitting_by_present_need(
        a_tenant("gold", tier="high", kv_nominal_percent=96),
        a_tenant("batch", tier="low", preemption=rule),
    )


def go_on_until(engine: Simulation, condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        engine.step()
    raise AssertionError("not within 500 steps")


def produce(engine: Simulation, requests: list[Request], more: int) -> None:
    """Go on until all of them have so many further tokens."""
    wanted = {r.request_id: len(engine.output(r.request_id)) + more for r in requests}
    go_on_until(
        engine, lambda: all(len(engine.output(name)) >= count for name, count in wanted.items())
    )


def phase_of(engine: Simulation, request: Request) -> Phase:
    seq = engine.scheduler._live.get(request.request_id)
    return Phase.ENDED if seq is None else seq.phase


def blocks_swapped_in(engine: Simulation) -> int:
    return sum(len(swap.device_blocks) for plan in engine.plans for swap in plan.swap_in)


def cached_tokens(engine: Simulation, tenant: str = "batch") -> int:
    return engine.scheduler.stats().tenants[tenant].cached_tokens


def assert_nothing_is_held(engine: Simulation) -> None:
    stats = engine.scheduler.stats()
    assert stats.kv_used_blocks == stats.host_used_blocks == 0


# -- preempted and resumed -------------------------------------------------------------------------


@each_of(late_by=LATE_BY, gold_tokens=(9, 32, 40))
def test_requests_swapped_out_and_back_go_on_as_alone(
    lab: Lab, gold_tokens: int, late_by: int
) -> None:
    engine = lab.engine(gold_above_batch(), blocks=26, max_num_seqs=2, late_by=late_by)
    batch = a_load("batch", PROMPT, some_tokens(1, 17), output=20)
    gold = a_load("gold", some_tokens(2, gold_tokens), some_tokens(3, gold_tokens), output=8)
    engine.accept(*batch)
    produce(engine, batch, 6)
    engine.accept(*gold)
    engine.drain()
    # What gold left alone is found in the prefix cache, and not brought back from the host.
    assert (
        blocks_swapped_in(engine)
        in {9: range(2, 3), 32: range(3, 9), 40: range(9, 13)}[gold_tokens]
    )
    assert sorted(one.request_id for one in engine.preempted()) == ["batch-0", "batch-1"]
    lab.assert_as_alone(engine, *batch, *gold)
    assert_nothing_is_held(engine)


@each_of(gold_tokens=(9, 40), max_batched_tokens=CHUNKS)
def test_requests_preempted_and_computed_again_go_on_as_alone(
    lab: Lab, gold_tokens: int, max_batched_tokens: int
) -> None:
    engine = lab.engine(
        gold_above_batch(PreemptionMode.RECOMPUTE),
        blocks=26,
        max_num_seqs=2,
        max_batched_tokens=max_batched_tokens,
    )
    batch = a_load("batch", PROMPT, some_tokens(1, 17), output=20)
    gold = a_load("gold", some_tokens(2, gold_tokens), some_tokens(3, gold_tokens), output=8)
    engine.accept(*batch)
    produce(engine, batch, 6)
    engine.accept(*gold)
    engine.drain()
    assert sorted(one.request_id for one in engine.preempted()) == ["batch-0", "batch-1"]
    assert not any(plan.swap_out for plan in engine.plans)
    lab.assert_as_alone(engine, *batch, *gold)
    assert_nothing_is_held(engine)


@each_of(late_by=LATE_BY, sampling=SAMPLINGS)
def test_a_request_swapped_out_twice_goes_on_as_alone(
    lab: Lab, sampling: SamplingParams, late_by: int
) -> None:
    engine = lab.engine(gold_above_batch(), blocks=13, max_num_seqs=1, late_by=late_by)
    [batch] = a_load("batch", PROMPT, output=24, sampling=sampling)
    gold = a_load("gold", some_tokens(2, 40), some_tokens(3, 40), output=8)
    engine.accept(batch)
    for each in gold:
        produce(engine, [batch], 6)
        engine.accept(each)
        go_on_until(engine, lambda each=each: phase_of(engine, each) is Phase.ENDED)  # type: ignore[misc]
    engine.drain()
    assert len(engine.preempted()) == 2
    assert blocks_swapped_in(engine) >= 10
    lab.assert_as_alone(engine, batch, *gold)
    assert_nothing_is_held(engine)


@each_of(late_by=LATE_BY, mode=MODES)
def test_two_victims_that_share_a_prefix_go_on_as_alone(
    lab: Lab, mode: PreemptionMode, late_by: int
) -> None:
    engine = lab.engine(gold_above_batch(mode), blocks=26, max_num_seqs=2, late_by=late_by)
    shared = some_tokens(0, 12)
    batch = a_load("batch", shared + some_tokens(1, 5), shared + some_tokens(2, 7), output=20)
    gold = a_load("gold", some_tokens(3, 40), some_tokens(4, 40), output=8)
    for request in batch:
        engine.accept(request)
        produce(engine, [request], 2)
    assert cached_tokens(engine) == 12
    produce(engine, batch, 4)
    engine.accept(*gold)
    engine.drain()
    assert sorted(one.request_id for one in engine.preempted()) == ["batch-0", "batch-1"]
    lab.assert_as_alone(engine, *batch, *gold)
    assert_nothing_is_held(engine)


@each_of(late_by=LATE_BY)
def test_who_shares_a_prefix_with_a_victim_goes_on_beside_its_copy(lab: Lab, late_by: int) -> None:
    engine = lab.engine(gold_above_batch(), blocks=22, max_num_seqs=2, late_by=late_by)
    shared = some_tokens(0, 12)
    batch = a_load("batch", shared + some_tokens(1, 5), shared + some_tokens(2, 7), output=20)
    [gold] = a_load("gold", some_tokens(3, 44), output=8)
    for request in batch:
        engine.accept(request)
        produce(engine, [request], 2)
    produce(engine, batch, 4)
    engine.accept(gold)
    engine.drain()
    [victim] = engine.preempted()
    assert victim.request_id == "batch-1"
    assert blocks_swapped_in(engine) == 2
    lab.assert_as_alone(engine, *batch, gold)
    assert_nothing_is_held(engine)


# -- prefix cache ----------------------------------------------------------------------------------


@each_of(max_batched_tokens=CHUNKS, sampling=SAMPLINGS)
def test_a_prompt_that_was_computed_before_gives_the_same_output(
    lab: Lab, sampling: SamplingParams, max_batched_tokens: int
) -> None:
    engine = lab.engine(gold_above_batch(), max_batched_tokens=max_batched_tokens)
    first, second = a_load("batch", PROMPT, PROMPT, output=12, sampling=sampling)
    engine.accept(first)
    engine.drain()
    engine.accept(second)
    engine.drain()
    assert cached_tokens(engine) == 16
    lab.assert_as_alone(engine, first, second)


@each_of(max_batched_tokens=CHUNKS)
def test_prompts_that_differ_in_a_token_or_in_their_tenant_are_told_apart(
    lab: Lab, max_batched_tokens: int
) -> None:
    engine = lab.engine(gold_above_batch(), max_batched_tokens=max_batched_tokens)
    prompts = [(*PROMPT[:i], 2, *PROMPT[i + 1 :]) for i in (0, 7, 15)]
    batch = a_load("batch", PROMPT, *prompts, output=8)
    for request in batch:
        engine.accept(request)
        engine.drain()
    [gold] = a_load("gold", PROMPT, output=8)
    engine.accept(gold)
    engine.drain()
    assert (cached_tokens(engine), cached_tokens(engine, "gold")) == (0 + 4 + 12, 0)
    lab.assert_as_alone(engine, *batch, gold)


@each_of(is_running=(False, True))
def test_a_prompt_that_is_cached_whole_gives_the_same_output(lab: Lab, *, is_running: bool) -> None:
    engine = lab.engine(gold_above_batch())
    # Both compute the last token of the last block, each in its own copy, and continue there.
    batch = a_load("batch", *[some_tokens(0, 16)] * 3, output=12)
    engine.accept(batch[0])
    if is_running:
        produce(engine, batch[:1], 3)
    else:
        engine.drain()
    engine.accept(*batch[1:])
    engine.drain()
    assert sum(len(plan.copies) for plan in engine.plans) == 2
    assert cached_tokens(engine) == 2 * 15
    lab.assert_as_alone(engine, *batch)
    assert_nothing_is_held(engine)


@each_of(max_batched_tokens=CHUNKS, sampling=SAMPLINGS)
def test_a_conversation_goes_on_as_if_every_turn_were_computed_anew(
    lab: Lab, sampling: SamplingParams, max_batched_tokens: int
) -> None:
    engine = lab.engine(gold_above_batch(), max_batched_tokens=max_batched_tokens)
    prompt = PROMPT
    for turn in range(3):
        request = a_request(
            "batch", prompt=prompt, output=11, request_id=f"turn-{turn}", sampling=sampling
        )
        engine.accept(request)
        engine.drain()
        lab.assert_as_alone(engine, request)
        # The last output token was never computed.
        prompt = (*prompt, *engine.output(request.request_id), *some_tokens(turn + 1, 6))
    whole_blocks = [27 // BLOCK_SIZE, 44 // BLOCK_SIZE]
    assert cached_tokens(engine) == BLOCK_SIZE * sum(whole_blocks)


# -- neighbours and chunks -------------------------------------------------------------------------


@each_of(max_batched_tokens=CHUNKS, max_num_seqs=(2, 5))
def test_outputs_depend_neither_on_neighbours_nor_on_the_chunk_size(
    lab: Lab, max_num_seqs: int, max_batched_tokens: int
) -> None:
    engine = lab.engine(
        gold_above_batch(), max_num_seqs=max_num_seqs, max_batched_tokens=max_batched_tokens
    )
    prompts = [some_tokens(number, count) for number, count in enumerate((1, 8, 23, 13, 30))]
    batch = a_load("batch", *prompts, output=14)
    engine.accept(*batch)
    engine.drain()
    lab.assert_as_alone(engine, *batch)


@each_of(late_by=LATE_BY, max_batched_tokens=CHUNKS, mode=MODES)
def test_requests_that_outgrow_the_pool_together_end_as_alone(
    lab: Lab, mode: PreemptionMode, max_batched_tokens: int, late_by: int
) -> None:
    engine = lab.engine(
        gold_above_batch(mode), blocks=18, max_batched_tokens=max_batched_tokens, late_by=late_by
    )
    prompts = [some_tokens(number, count) for number, count in enumerate((11, 14, 9, 12))]
    batch = a_load("batch", *prompts, output=24)
    engine.accept(*batch)
    engine.drain()
    assert len(engine.preempted()) >= 2
    lab.assert_as_alone(engine, *batch)
    assert_nothing_is_held(engine)


# -- cancels in the middle of a copy ---------------------------------------------------------------


def cancel_in_the_midst(engine: Simulation, request: Request) -> None:
    """Cancel a request while its copy, begun with the coming step, is in flight."""

    def cancel() -> None:
        assert request.request_id in {swap.request_id for swap in engine.executor.copying.values()}
        assert engine.cancel(request.request_id)

    engine.executor.at_execution = cancel
    engine.step()
    engine.executor.at_execution = None


@each_of(late_by=LATE_BY, is_way_out=(True, False))
def test_what_a_request_cancelled_in_the_midst_of_a_swap_held_serves_others(
    lab: Lab, *, is_way_out: bool, late_by: int
) -> None:
    engine = lab.engine(gold_above_batch(), blocks=18, max_num_seqs=2, late_by=late_by)
    batch = a_load("batch", PROMPT, some_tokens(1, 30), output=16)
    gold = a_load("gold", some_tokens(2, 32), some_tokens(3, 32), output=8)
    # There are steps during the copy, too.
    bystander = a_request("gold", prompt=some_tokens(4, 4), output=26, request_id="bystander")
    engine.accept(bystander, batch[0])
    produce(engine, batch[:1], 6)
    engine.accept(gold[0])
    if not is_way_out:
        go_on_until(engine, lambda: phase_of(engine, gold[0]) is Phase.ENDED)
    cancel_in_the_midst(engine, batch[0])
    produced = engine.output("batch-0")
    engine.accept(batch[1], gold[1])
    engine.drain()
    assert engine.output("batch-0") == produced
    lab.assert_as_alone(engine, bystander, batch[1], *gold)
    assert_nothing_is_held(engine)


@each_of(late_by=LATE_BY, is_way_out=(True, False))
def test_what_a_request_cancelled_in_the_midst_of_a_swap_had_computed_is_found_again(
    lab: Lab, *, is_way_out: bool, late_by: int
) -> None:
    engine = lab.engine(gold_above_batch(), blocks=13, max_num_seqs=1, late_by=late_by)
    [batch] = a_load("batch", PROMPT, output=20)
    [gold] = a_load("gold", some_tokens(2, 9 if is_way_out else 40), output=8)
    engine.accept(batch)
    produce(engine, [batch], 6)
    engine.accept(gold)
    if not is_way_out:
        go_on_until(engine, lambda: phase_of(engine, gold) is Phase.ENDED)
    cancel_in_the_midst(engine, batch)
    engine.drain()
    prompt = (*PROMPT, *engine.output("batch-0"))
    again = a_request("batch", prompt=prompt, output=10, request_id="again")
    engine.accept(again)
    engine.drain()
    assert cached_tokens(engine) == 20
    lab.assert_as_alone(engine, again, gold)
