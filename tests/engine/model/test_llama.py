import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.llama import Llama
from tidegate_testing.models import TINY, plan_row, random_tensors, tiny_model

NUM_BLOCKS = 64
PROMPT = torch.randint(0, TINY.vocab_size, (50,), generator=torch.Generator().manual_seed(1))
TOKENS: list[int] = PROMPT.tolist()
IN_ORDER = [*range(13)]
SHUFFLED = [40, 3, 17, 60, 22, 5, 51, 9, 33, 12, 0, 63, 28]
# Sizes that the CPU's kernels fit, unlike TINY's.
SIXTEENS = dataclasses.replace(
    TINY, hidden_size=64, head_size=32, intermediate_size=96, vocab_size=288
)
CASES = {
    "tied": TINY,
    "untied": dataclasses.replace(TINY, has_tied_embeddings=False),
    "kernels": SIXTEENS,
    "kernels-untied-6-to-1": dataclasses.replace(
        SIXTEENS, has_tied_embeddings=False, num_heads=6, num_kv_heads=1
    ),
}


@pytest.fixture(params=CASES)
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    cache = tmp_path_factory.getbasetemp() / "kernels"
    model = tiny_model(CASES[request.param])
    return Llama(model.config, model.weights, kernel_cache=cache)


def block_size_of(config: LlamaConfig) -> int:
    return 16 if config.head_size == SIXTEENS.head_size else 4


def new_pool(config: LlamaConfig) -> Tensor:
    sizes = (block_size_of(config), config.num_kv_heads, config.head_size)
    return torch.zeros(NUM_BLOCKS + 1, config.num_layers, 2, *sizes)


def step(llama: Llama, pool: Tensor, *rows: PlanRow) -> Tensor:
    block_size = block_size_of(llama.config)
    batch = build_batch(rows, llama.config, num_blocks=NUM_BLOCKS, block_size=block_size)
    with torch.inference_mode():
        return llama.forward(batch, pool)


def whole(llama: Llama, tokens: list[int], blocks: list[int] = IN_ORDER) -> Tensor:
    return step(llama, new_pool(llama.config), plan_row(tokens, blocks))[0]


def is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=5e-5)


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
    assert logits.shape == (1, llama.config.vocab_size)
    assert is_close(logits[0], whole(llama, TOKENS[:5]))


def test_the_last_logits_are_those_of_a_model_written_out_plainly(llama: Llama) -> None:
    expected = written_out(llama.config, random_tensors(llama.config), TOKENS)
    assert is_close(whole(llama, TOKENS), expected.float())


def written_out(config: LlamaConfig, tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Llama in doubles, a head at a time, without a cache; rotation by complex numbers."""
    weights = {name.removesuffix(".weight"): tensor.double() for name, tensor in tensors.items()}
    size, shared = config.head_size, config.num_heads // config.num_kv_heads
    speeds = config.rope_theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.arange(len(tokens)).double()[:, None] * speeds
    turns = torch.polar(torch.ones_like(angles), angles)
    future = torch.ones(len(tokens), len(tokens)).triu(1).bool()

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name]

    def turned(x: Tensor) -> Tensor:
        product = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turns
        return torch.cat((product.real, product.imag), dim=1)

    x = weights["model.embed_tokens"][tokens]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (y @ weights[f"{layer}.self_attn.{part}_proj"].T).view(len(tokens), -1, size).unbind(1)
            for part in "qkv"
        )
        heads = []
        for head in range(config.num_heads):
            kv_head = head // shared
            scores = turned(q[head]) @ turned(k[kv_head]).T / math.sqrt(size)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[kv_head])
        x = x + torch.cat(heads, dim=1) @ weights[f"{layer}.self_attn.o_proj"].T
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (y @ weights[f"{layer}.mlp.{part}_proj"].T for part in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{layer}.mlp.down_proj"].T
    output = weights["model.embed_tokens" if config.has_tied_embeddings else "lm_head"]
    return output @ norm(x[-1], "model.norm")


def test_weights_take_the_memory_that_they_are_laid_out_in() -> None:
    config = dataclasses.replace(TINY, has_tied_embeddings=False)
    weights = tiny_model(config).weights
    whole = Llama(config, weights).weight_bytes
    assert whole == 4 * weights.num_parameters
    matrices = weights.output.numel() + sum(
        matrix.numel()
        for layer in weights.layers
        for matrix in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
    )
    in_8_bits = Llama(config, weights, quantization="int8").weight_bytes
    assert whole - 4 * matrices + matrices < in_8_bits < whole - 2 * matrices
