"""What every executor promises to the scheduler, whatever it computes with."""

import dataclasses

import pytest

from tidegate_engine.core.plan import BlockCopy, PlanRow, StepPlan, SwapCopy
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.executor.base import Executor, ExecutorError
from tidegate_testing.executors import Generation, Steps
from tidegate_testing.sampling import a_context

PROMPTS = [[5, 9, 2, 7], [11, 3, 3, 8, 1, 4, 6, 2, 9], [42], [*range(1, 24)]]
PROMPT = PROMPTS[1]
TABLE = [9, 2, 30, 4, 17, 11, 50, 23, 41]
OTHER_TABLE = [20, 21, 63, 1, 0, 8, 13, 33, 54]
SEEDED = SamplingParams(seed=5, temperature=1.0)
# Strong enough that a miscounted token is seen, and with a draw that depends on the position.
PENALISED = SamplingParams(
    seed=5, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=2.0, min_tokens=6
)


@pytest.fixture
def steps(executor: Executor) -> Steps:
    return Steps(executor)


def alone(steps: Steps, prompt: list[int], count: int = 8, **options: int) -> list[int]:
    return Generation(steps, [*prompt], [*TABLE]).run(count, **options)


def overwrite(steps: Steps, blocks: list[int]) -> None:
    """Let another request fill blocks."""
    size = steps.executor.capacity.block_size
    tokens = [(7 * i) % 40 for i in range(len(blocks) * size)]
    steps.run(PlanRow("other", 0, tokens, blocks, samples=False, sampling=a_context()))


def padding(token: int, end: int) -> PlanRow:
    row = PlanRow("", end - 1, [token], [*TABLE], samples=False, sampling=a_context())
    return row._replace(is_decode=True, is_padding=True)


# -- rows ------------------------------------------------------------------------------------------


def test_the_output_does_not_depend_on_the_neighbours(steps: Steps) -> None:
    together = [
        Generation(steps, [*prompt], [*range(16 * i, 16 * i + 9)], request_id=f"r{i}")
        for i, prompt in enumerate(PROMPTS)
    ]
    for _ in range(8):
        rows = [generation.row() for generation in together]
        result = steps.run(*rows)
        for generation, row in zip(together, rows, strict=True):
            generation.take(row, result)
    for generation, prompt in zip(together, PROMPTS, strict=True):
        assert generation.tokens[len(prompt) :] == alone(steps, prompt)


def test_the_output_does_not_depend_on_the_chunk_size(steps: Steps) -> None:
    for prompt in PROMPTS:
        assert alone(steps, prompt, chunk=3) == alone(steps, prompt)


def test_the_output_does_not_depend_on_what_the_blocks_held_before(steps: Steps) -> None:
    first = alone(steps, PROMPT)
    overwrite(steps, TABLE)
    assert alone(steps, PROMPT) == first


def test_the_output_depends_on_the_prompt_and_varies(steps: Steps) -> None:
    outputs = [alone(steps, prompt) for prompt in PROMPTS]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert len({token for output in outputs for token in output}) > 8


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED, PENALISED])
def test_a_request_computed_anew_goes_on_as_it_would_have(
    steps: Steps, sampling: SamplingParams
) -> None:
    whole = Generation(steps, [*PROMPT], [*TABLE], sampling=sampling).run(9)
    anew = Generation(
        steps,
        [*PROMPT, *whole[:5]],
        [*OTHER_TABLE],
        sampling=sampling,
        num_prompt_tokens=len(PROMPT),
    )
    assert anew.run(4, chunk=10) == whole[5:]


def test_another_block_in_the_table_changes_the_output(steps: Steps) -> None:
    undisturbed = Generation(steps, [*PROMPT], [*TABLE])
    overwrite(steps, OTHER_TABLE)
    output = undisturbed.run(8)
    disturbed = Generation(steps, [*PROMPT], [*TABLE])
    disturbed.run(4)
    disturbed.blocks[:3] = OTHER_TABLE[:3]
    assert disturbed.run(4) != output[4:]


def test_every_sampling_row_gets_exactly_one_token(steps: Steps) -> None:
    generations = [
        Generation(steps, [*prompt], [*range(16 * i, 16 * i + 9)], request_id=f"r{i}")
        for i, prompt in enumerate(PROMPTS)
    ]
    result = steps.run(*(generation.row(6) for generation in generations))
    assert set(result.tokens) == {"r0", "r2"}
    assert steps.run().tokens == {}


def test_a_row_that_cannot_be_computed_is_named_with_its_step(steps: Steps) -> None:
    short = Generation(steps, [*PROMPT], TABLE[:2], request_id="short")
    with pytest.raises(ExecutorError, match="step 1: row of request short"):
        steps.run(short.row())


# -- padding ---------------------------------------------------------------------------------------


def test_padding_changes_no_block_and_gives_no_token(steps: Steps) -> None:
    output = alone(steps, PROMPT)
    padded = Generation(steps, [*PROMPT], [*TABLE])
    padded.run(4)
    for end in (1, 5, 13):
        result = steps.run(padding(3, end), padded.row(), padding(8, end))
        assert set(result.tokens) == {"r"}
        padded.take(padded.row(), result)
    assert steps.run(padding(3, 2)).tokens == {}
    assert padded.tokens[len(PROMPT) :] + padded.run(1) == output


# -- copies on write -------------------------------------------------------------------------------


def test_a_copied_block_continues_as_its_source_would_have(steps: Steps) -> None:
    source = Generation(steps, [*PROMPT], [*TABLE])
    source.run(3)
    # Both share the full blocks; the one that is begun is copied, then written by each.
    copy = Generation(steps, [*source.tokens], [*TABLE[:2], *OTHER_TABLE], computed=source.computed)
    row = copy.row()
    copy.take(row, steps.run(row, copies=[BlockCopy(TABLE[2], OTHER_TABLE[0])]))
    overwrite(steps, TABLE[2:])
    assert copy.tokens[-1:] + copy.run(4) == alone(steps, PROMPT)[3:]


def test_all_copies_are_read_before_any_is_written(steps: Steps) -> None:
    first = Generation(steps, [*PROMPT], [*TABLE])
    first.run(3)
    copies = [BlockCopy(TABLE[0], TABLE[1]), BlockCopy(TABLE[1], OTHER_TABLE[1])]
    steps.run(copies=copies)
    first.blocks[1] = OTHER_TABLE[1]
    assert first.run(5) == alone(steps, PROMPT)[3:8]


# -- swaps and fences ------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SEEDED, PENALISED])
def test_a_request_swapped_out_and_back_goes_on_as_it_would_have(
    steps: Steps, sampling: SamplingParams
) -> None:
    whole = Generation(steps, [*PROMPT], [*TABLE], sampling=sampling).run(10)
    swapped = Generation(steps, [*PROMPT], [*TABLE], sampling=sampling)
    swapped.run(5)
    host = (3, 15, 0, 7)
    steps.run(swap_out=[SwapCopy(1, "r", tuple(TABLE[:4]), host)])
    steps.wait_for(1)
    overwrite(steps, TABLE)
    overwrite(steps, OTHER_TABLE)
    steps.run(swap_in=[SwapCopy(2, "r", tuple(OTHER_TABLE[:4]), host)])
    steps.wait_for(2)
    swapped.blocks = [*OTHER_TABLE]
    assert swapped.run(5) == whole[5:]


def test_swaps_run_beside_steps_that_touch_none_of_their_blocks(steps: Steps) -> None:
    expected = alone(steps, PROMPT)
    away = Generation(steps, [*PROMPT], [*OTHER_TABLE])
    away.run(2)
    beside = Generation(steps, [*PROMPT], [*TABLE])
    row = beside.row()
    swap = SwapCopy(1, "away", tuple(OTHER_TABLE[:3]), (0, 1, 2))
    beside.take(row, steps.run(row, swap_out=[swap]))
    assert beside.tokens[-1:] + beside.run(7) == expected
    assert steps.passed == [1]


def test_every_fence_passes_exactly_once(steps: Steps) -> None:
    out = [SwapCopy(i, "r", (34 + 2 * i, 35 + 2 * i), (2 * i, 2 * i + 1)) for i in range(1, 6)]
    steps.run(swap_out=out)
    busy = Generation(steps, [*PROMPT], [*OTHER_TABLE])
    busy.run(2)
    while len(steps.passed) < 5:
        assert steps.run().passed_fences
    # The last two go back to other blocks while a third follows them out.
    back = [SwapCopy(10 + i, "r", (49 + 2 * i, 50 + 2 * i), out[i].host_blocks) for i in (3, 4)]
    steps.run(swap_in=back, swap_out=[SwapCopy(20, "s", (36, 37), (0, 1))])
    while len(steps.passed) < 8:
        assert steps.run().passed_fences
    assert sorted(steps.passed) == [1, 2, 3, 4, 5, 13, 14, 20]
    assert steps.run(busy.row()).passed_fences == ()


def test_waiting_for_a_fence_when_none_is_open_is_an_error(executor: Executor) -> None:
    with pytest.raises(ExecutorError, match="step 7: waits for a fence, but none is open"):
        executor.execute(StepPlan(step=7, revision=1, num_open_fences=1))


def touching_row(block: int) -> PlanRow:
    return PlanRow("r", 0, [1], [block], samples=True, sampling=a_context())


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ({"rows": (touching_row(5),)}, "row of request r: device block 5 belongs"),
        ({"copies": (BlockCopy(9, 5),)}, "copy: device block 5 belongs"),
        ({"copies": (BlockCopy(9, 64),)}, r"copy: device block 64 isn't in \[0, 64\)"),
        ({"swap_in": (SwapCopy(2, "s", (5,), (1,)),)}, "swap 2 of request s: device block 5 be"),
        ({"swap_in": (SwapCopy(2, "s", (6,), (0,)),)}, "swap 2 of request s: host block 0 belo"),
        ({"swap_in": (SwapCopy(2, "s", (6,), (16,)),)}, r"host block 16 isn't in \[0, 16\)"),
        ({"swap_in": (SwapCopy(2, "s", (-1,), (1,)),)}, r"device block -1 isn't in \[0, 64\)"),
        ({"swap_in": (SwapCopy(1, "s", (6,), (1,)),)}, "its fence is open already"),
        ({"swap_in": (SwapCopy(2, "s", (6, 7), (1,)),)}, "2 device blocks for 1 host blocks"),
    ],
)
def test_a_plan_that_touches_a_block_of_its_swap_does_nothing(
    steps: Steps, parts: dict[str, tuple[object, ...]], problem: str
) -> None:
    kept = Generation(steps, [*PROMPT], [5, 9, 6, 7])
    before = kept.run(2)
    swap = SwapCopy(1, "r", (5,), (0,))
    plan = StepPlan(step=3, revision=1, swap_out=(swap,), num_open_fences=1)
    with pytest.raises(ExecutorError, match=f"^step 3: .*{problem}"):
        steps.executor.execute(dataclasses.replace(plan, **parts))  # type: ignore[arg-type]
    assert before + kept.run(4) == alone(steps, PROMPT, 6)
    steps.run(swap_out=[swap])
    steps.wait_for(1)
    assert steps.passed == [1]


def test_a_block_on_its_way_to_the_host_may_be_read_and_swapped_out_once_more(
    steps: Steps,
) -> None:
    kept = Generation(steps, [*PROMPT], [5, 9, 6, 7])
    before = kept.run(2)
    steps.run(swap_out=[SwapCopy(1, "a", (5,), (0,)), SwapCopy(2, "b", (5,), (1,))])
    assert before + kept.run(4) == alone(steps, PROMPT, 6)
    steps.wait_for(1)
    steps.wait_for(2)
    assert sorted(steps.passed) == [1, 2]


# -- costs -----------------------------------------------------------------------------------------


def test_measuring_leaves_nothing_behind(steps: Steps) -> None:
    generation = Generation(steps, [*PROMPT], [*TABLE])
    expected = alone(steps, PROMPT)
    output = generation.run(4)
    costs = dataclasses.asdict(steps.executor.measure())
    assert output + generation.run(4) == expected
    assert steps.passed == []
    assert min(costs.values()) >= 0
    assert costs["step_seconds"] + costs["decode_seconds"] > 0
    assert costs["swap_block_seconds"] > 0


def test_blocks_of_a_failed_steps_own_swaps_may_be_used_at_once(steps: Steps) -> None:
    executor = steps.executor
    broken = PlanRow("short", 0, [1], [10_000], samples=True, sampling=a_context())
    failing = StepPlan(
        step=3,
        revision=1,
        rows=(broken,),
        swap_out=(SwapCopy(1, "a", (3, 4), (5, 6)),),
        swap_in=(SwapCopy(2, "b", (7,), (0,)),),
        num_open_fences=2,
    )
    with pytest.raises(ExecutorError, match="short"):
        executor.execute(failing)
    row = PlanRow("next", 0, [*PROMPT], [7, 4, 5], samples=False, sampling=a_context())
    again = StepPlan(
        step=4,
        revision=1,
        rows=(row,),
        swap_out=(SwapCopy(3, "c", (3,), (0,)),),
        num_open_fences=1,
    )
    passed = executor.execute(again).passed_fences
    while not passed:
        passed = executor.execute(StepPlan(step=4, revision=1, num_open_fences=1)).passed_fences
    assert passed == (3,)
