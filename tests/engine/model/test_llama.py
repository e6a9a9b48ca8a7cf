import dataclasses

import pytest
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.llama import Llama
from tidegate_testing.models import TINY, plan_row, tiny_model

BLOCK_SIZE = 4
NUM_BLOCKS = 64
PROMPT = torch.randint(0, TINY.vocab_size, (50,), generator=torch.Generator().manual_seed(1))
TOKENS: list[int] = PROMPT.tolist()
IN_ORDER = [*range(13)]
SHUFFLED = [40, 3, 17, 60, 22, 5, 51, 9, 33, 12, 0, 63, 28]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def llama(request: pytest.FixtureRequest) -> Llama:
    model = tiny_model(dataclasses.replace(TINY, has_tied_embeddings=request.param))
    return Llama(model.config, model.weights)


def new_pool(config: LlamaConfig) -> Tensor:
    return torch.zeros(
        NUM_BLOCKS, config.num_layers, 2, BLOCK_SIZE, config.num_kv_heads, config.head_size
    )


def step(llama: Llama, pool: Tensor, *rows: PlanRow) -> Tensor:
    batch = build_batch(rows, llama.config, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    with torch.inference_mode():
        return llama.forward(batch, pool)


def whole(llama: Llama, tokens: list[int], blocks: list[int] = IN_ORDER) -> Tensor:
    return step(llama, new_pool(llama.config), plan_row(tokens, blocks))[0]


def is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sizes", [[50], [1] * 50, [17, 33], [4, 4, 42], [49, 1]])
def test_prefill_in_chunks_is_prefill_in_one(llama: Llama, sizes: list[int]) -> None:
    pool = new_pool(llama.config)
    start = 0
    logits = torch.empty(0)
    for size in sizes:
        logits = step(llama, pool, plan_row(TOKENS[start : start + size], SHUFFLED, start=start))
        start += size
    assert is_close(logits[0], whole(llama, TOKENS))


def test_which_blocks_hold_a_sequence_does_not_matter(llama: Llama) -> None:
    assert torch.equal(whole(llama, TOKENS, SHUFFLED), whole(llama, TOKENS, IN_ORDER))


def test_neighbours_in_the_step_do_not_matter(llama: Llama) -> None:
    pool = new_pool(llama.config)
    step(llama, pool, plan_row(TOKENS[:49], SHUFFLED, samples=False))
    together = step(
        llama,
        pool,
        plan_row(TOKENS[:20], [50, 2, 44, 8, 61]),
        plan_row(TOKENS[49:], SHUFFLED, start=49),
        plan_row(TOKENS[5:6], [1]),
    )
    for logits, tokens in zip(together, (TOKENS[:20], TOKENS, TOKENS[5:6]), strict=True):
        assert is_close(logits, whole(llama, tokens))


def test_only_sampling_rows_get_logits(llama: Llama) -> None:
    logits = step(
        llama,
        new_pool(llama.config),
        plan_row(TOKENS[:9], [0, 1, 2], samples=False),
        plan_row(TOKENS[:5], [3, 4]),
    )
    assert logits.shape == (1, TINY.vocab_size)
    assert is_close(logits[0], whole(llama, TOKENS[:5]))


def test_the_order_of_tokens_matters(llama: Llama) -> None:
    # Without positions attention would see a bag of tokens.
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert (whole(llama, TOKENS) - whole(llama, swapped)).abs().max() > 0.01
