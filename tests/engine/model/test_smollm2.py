"""The real model through the real executor: what is computed doesn't depend on how."""

import pytest

from tidegate_engine.core.plan import PlanRow, StepPlan
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel
from tidegate_testing.models import plan_row

pytestmark = pytest.mark.model

QUESTIONS = ("What is the capital of France?", "Count from 1 to 9.", "Why is the sky blue?")


@pytest.fixture(scope="module")
def executor(smollm2: LoadedModel) -> TorchExecutor:
    return TorchExecutor(
        Llama(smollm2.config, smollm2.weights),
        KvCache.allocate(smollm2.config, num_blocks=64, block_size=16),
    )


def ask(model: LoadedModel, question: str) -> list[int]:
    return model.tokenizer.apply_chat_template([{"role": "user", "content": question}])


def run(executor: TorchExecutor, *rows: PlanRow) -> dict[str, int]:
    result = executor.execute(StepPlan(step=1, revision=0, rows=rows))
    return {request: token.token_id for request, token in result.tokens.items()}


def answer(
    executor: TorchExecutor, prompt: list[int], blocks: list[int], *, count: int, chunk: int = 512
) -> list[int]:
    """Greedy tokens of one request, computed alone."""
    for start in range(0, len(prompt) - chunk, chunk):
        run(executor, plan_row(prompt[start : start + chunk], blocks, start=start, samples=False))
    computed = (len(prompt) - 1) // chunk * chunk
    tokens = [*prompt]
    for _ in range(count):
        row = plan_row(tokens[computed:], blocks, start=computed)
        computed = len(tokens)
        tokens.append(run(executor, row)["r"])
    return tokens[len(prompt) :]


def test_it_knows_the_capital_of_france(smollm2: LoadedModel, executor: TorchExecutor) -> None:
    tokens = answer(executor, ask(smollm2, QUESTIONS[0]), [*range(4)], count=8)
    assert "Paris" in smollm2.tokenizer.decode(tokens)


def test_chunks_and_scattered_blocks_change_no_token(
    smollm2: LoadedModel, executor: TorchExecutor
) -> None:
    prompt = ask(smollm2, QUESTIONS[1])
    whole = answer(executor, prompt, [*range(5)], count=16)
    assert answer(executor, prompt, [33, 8, 51, 20, 2], count=16, chunk=7) == whole


def test_a_batch_gives_each_what_it_gets_alone(
    smollm2: LoadedModel, executor: TorchExecutor
) -> None:
    prompts = {str(i): ask(smollm2, question) for i, question in enumerate(QUESTIONS)}
    blocks = {name: [*range(int(name), 64, 3)] for name in prompts}
    tokens = {name: [*prompt] for name, prompt in prompts.items()}
    computed = dict.fromkeys(prompts, 0)
    # Each joins a step later than the one before: prefills beside decodes.
    for step in range(14):
        rows = []
        for name in list(prompts)[: step + 1]:
            row = plan_row(
                tokens[name][computed[name] :],
                blocks[name],
                start=computed[name],
                request_id=name,
            )
            rows.append(row)
            computed[name] = len(tokens[name])
        for name, token in run(executor, *rows).items():
            tokens[name].append(token)
    for name, prompt in prompts.items():
        together = tokens[name][len(prompt) :]
        assert answer(executor, prompt, blocks[name], count=len(together)) == together
