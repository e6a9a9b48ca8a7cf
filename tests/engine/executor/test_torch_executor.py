import dataclasses
import threading

import pytest
import torch

from tidegate_engine.core.plan import PlanRow, StepPlan, SwapCopy
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.executor import kv_copies
from tidegate_engine.executor.base import Capacity, ExecutorError
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_testing.devices import DEVICES, moved
from tidegate_testing.models import TINY, plan_row, tiny_model
from tidegate_testing.sampling import a_context

PROMPT = [7, 100, 33, 250, 61, 12, 5, 90, 200]
SEEDED = SamplingParams(seed=5, temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=DEVICES)
def executor(request: pytest.FixtureRequest) -> TorchExecutor:
    return an_executor(request.param)


@pytest.fixture
def cpu_executor() -> TorchExecutor:
    return an_executor("cpu")


def an_executor(device: str) -> TorchExecutor:
    # Tied, a random model mostly repeats its input.
    model = moved(tiny_model(dataclasses.replace(TINY, has_tied_embeddings=False)), device)
    cache = KvCache.allocate(
        model.config, num_blocks=40, num_host_blocks=20, block_size=4, device=device
    )
    return TorchExecutor(Llama(model.config, model.weights), cache)


def plan(*rows: PlanRow) -> StepPlan:
    return StepPlan(step=3, revision=1, rows=rows)


def generate(
    executor: TorchExecutor, sampling: SamplingParams, count: int, blocks: list[int]
) -> list[int]:
    """Prefill the prompt, then decode, alone."""
    tokens = [*PROMPT]
    start = 0
    for _ in range(count):
        row = plan_row(tokens[start:], blocks, start=start, sampling=sampling)
        start = len(tokens)
        tokens.append(executor.execute(plan(row)).tokens["r"].token_id)
    return tokens[len(PROMPT) :]


def test_capacity_is_that_of_the_pool(executor: TorchExecutor) -> None:
    block_bytes = KvCache.block_bytes(TINY, 4, torch.float32)
    assert executor.capacity == Capacity(
        num_blocks=40, num_host_blocks=20, block_size=4, block_bytes=block_bytes
    )


def test_padding_rows_write_to_the_scratch_block_alone() -> None:
    model = tiny_model()
    cache = KvCache.allocate(model.config, num_blocks=4, block_size=4)
    row = plan_row([1, 2], [0, 1], start=5, samples=False)._replace(is_padding=True)
    TorchExecutor(Llama(model.config, model.weights), cache).execute(plan(row))
    assert not cache.pool[:4].any()
    assert cache.pool[4].any()


def test_a_row_cannot_name_the_scratch_block(executor: TorchExecutor) -> None:
    with pytest.raises(ExecutorError, match=r"block ids must lie in \[0, 40\)"):
        executor.execute(plan(plan_row([1], [40])))


def test_a_swap_does_not_hold_its_step_up(
    cpu_executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(kv_copies, "_copy", lambda *_: released.wait())
    swaps = (SwapCopy(1, "a", (3,), (5,)), SwapCopy(2, "b", (4,), (6,)))
    row = plan_row(PROMPT, [0, 1, 2])
    step = StepPlan(step=1, revision=1, rows=(row,), num_open_fences=2)
    try:
        begun = cpu_executor.execute(dataclasses.replace(step, swap_out=swaps))
        assert (list(begun.tokens), begun.passed_fences) == (["r"], ())
        assert cpu_executor.execute(step).passed_fences == ()
    finally:
        released.set()
    waiting = dataclasses.replace(step, rows=())
    passed: tuple[int, ...] = ()
    while len(passed) < 2:
        passed += cpu_executor.execute(waiting).passed_fences
    assert passed == (1, 2)


def test_a_swap_that_broke_off_fails_each_later_step(
    cpu_executor: TorchExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def break_off(*_: object) -> None:
        released.wait()
        raise MemoryError("no page left")

    monkeypatch.setattr(kv_copies, "_copy", break_off)
    row = plan_row(PROMPT, [0, 1, 2])
    step = StepPlan(step=4, revision=1, rows=(row,), num_open_fences=1)
    cpu_executor.execute(dataclasses.replace(step, swap_out=(SwapCopy(1, "a", (3,), (5,)),)))
    released.set()
    waiting = dataclasses.replace(step, rows=())
    for each in (waiting, step, plan(row)):
        problem = f"step {each.step}: swap 1 of request a: MemoryError: no page left"
        with pytest.raises(ExecutorError, match=problem):
            cpu_executor.execute(each)


def test_blocks_of_a_failed_steps_own_swaps_may_be_used_at_once(executor: TorchExecutor) -> None:
    out, back = SwapCopy(1, "a", (3, 4), (5, 6)), SwapCopy(2, "b", (7,), (8,))
    failing = StepPlan(
        step=3,
        revision=1,
        rows=(plan_row([1], [], request_id="short"),),
        swap_out=(out,),
        swap_in=(back,),
        num_open_fences=2,
    )
    with pytest.raises(ExecutorError, match="step 3: row of request short"):
        executor.execute(failing)
    again = SwapCopy(3, "c", (3,), (8,))
    step = StepPlan(
        step=4,
        revision=1,
        rows=(plan_row(PROMPT, [7, 4, 5]),),
        swap_out=(again,),
        num_open_fences=1,
    )
    passed = executor.execute(step).passed_fences
    while not passed:
        passed = executor.execute(StepPlan(step=4, revision=1, num_open_fences=1)).passed_fences
    assert passed == (3,)


def test_an_empty_plan_computes_nothing(executor: TorchExecutor) -> None:
    assert executor.execute(plan()).tokens == {}


def test_only_rows_that_sample_get_a_token(executor: TorchExecutor) -> None:
    result = executor.execute(
        plan(
            plan_row(PROMPT, [0, 1, 2], request_id="chunk", samples=False),
            plan_row(PROMPT, [3, 4, 5], request_id="last"),
        )
    )
    assert list(result.tokens) == ["last"]
    nothing = executor.execute(plan(plan_row(PROMPT, [0, 1, 2], samples=False)))
    assert nothing.tokens == {}


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_request_started_over_goes_on_as_it_would_have(
    executor: TorchExecutor, sampling: SamplingParams
) -> None:
    blocks = [9, 2, 30, 4, 17, 11]
    undisturbed = generate(executor, sampling, 12, blocks)
    # Preempted after six tokens: everything is computed again, in other blocks, in two chunks.
    known = [*PROMPT, *undisturbed[:6]]
    other = [20, 21, 22, 23, 24, 25]
    executor.execute(plan(plan_row(known[:10], other, samples=False)))
    row = plan_row(known[10:], other, start=10, sampling=sampling)
    assert executor.execute(plan(row)).tokens["r"].token_id == undisturbed[6]
    assert len(set(undisturbed)) > 3


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_neighbours_change_no_token(executor: TorchExecutor, sampling: SamplingParams) -> None:
    alone = generate(executor, sampling, 8, [0, 1, 2, 3, 4])
    tokens = [*PROMPT]
    start = 0
    for i in range(8):
        rows = [
            plan_row([3 * i + 1], [30 + i], request_id="n1", sampling=SEEDED),
            plan_row(tokens[start:], [9, 8, 7, 6, 5], start=start, sampling=sampling),
            plan_row(PROMPT[: i + 1], [20, 21, 22], request_id="n2", samples=False),
        ]
        start = len(tokens)
        tokens.append(executor.execute(plan(*rows)).tokens["r"].token_id)
    assert tokens[len(PROMPT) :] == alone


def test_log_probabilities_come_along_when_asked_for(executor: TorchExecutor) -> None:
    asked = SamplingParams(temperature=0.0, logprobs=3)
    token = executor.execute(plan(plan_row(PROMPT, [0, 1, 2], sampling=asked))).tokens["r"]
    assert token.logprob is not None
    assert token.top_logprobs[0] == (token.token_id, token.logprob)
    assert len(token.top_logprobs) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_computes_and_draws_the_same(device: str) -> None:
    here, there = an_executor("cpu"), an_executor(device)
    for params in (GREEDY, SEEDED, dataclasses.replace(SEEDED, top_k=8, top_p=0.9)):
        asked = dataclasses.replace(params, logprobs=3)
        rows = [
            plan_row(PROMPT[:count], [4 * i, 4 * i + 1, 4 * i + 2], request_id=str(i))
            for i, count in enumerate((1, 4, 9))
        ]
        step = plan(*(row._replace(sampling=a_context(asked, row.token_ids)) for row in rows))
        expected, result = here.execute(step).tokens, there.execute(step).tokens
        for name, token in expected.items():
            assert result[name].token_id == token.token_id
            assert result[name].logprob == pytest.approx(token.logprob, abs=1e-3)


def test_a_plan_that_cannot_be_computed_names_step_and_request(executor: TorchExecutor) -> None:
    fine = plan_row(PROMPT, [0, 1, 2], request_id="fine")
    with pytest.raises(ExecutorError, match="step 3: row of request r: needs 3 blocks"):
        executor.execute(plan(fine, plan_row(PROMPT, [5])))


def test_a_row_whose_logits_are_not_finite_fails_alone(executor: TorchExecutor) -> None:
    sound = plan_row([5, 6], [4], request_id="sound")
    alone = executor.execute(plan(sound))
    executor.execute(plan(plan_row(PROMPT, [0, 1, 2], samples=False)))
    executor._kv_cache.pool[0] = torch.nan
    broken = plan_row([3], [0, 1, 2], start=len(PROMPT), request_id="broken")
    result = executor.execute(plan(broken, sound))
    assert result.tokens == alone.tokens
    assert list(result.failures) == ["broken"]
    assert "not finite" in result.failures["broken"]


def test_a_device_that_fails_is_an_executor_error() -> None:
    model = tiny_model()
    # A pool of another dtype than the model's stands for a device error: torch raises in the step.
    cache = KvCache.allocate(model.config, num_blocks=4, block_size=4, dtype=torch.float64)
    executor = TorchExecutor(Llama(model.config, model.weights), cache)
    with pytest.raises(ExecutorError, match="step 3"):
        executor.execute(plan(plan_row([1], [0])))
