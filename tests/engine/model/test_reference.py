"""Against `transformers`, which reads the same GGUF file with its own code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel, smollm2_path
from tidegate_testing.models import plan_row

pytestmark = pytest.mark.reference

BLOCK_SIZE = 16
# Below this gap between the two best logits, rounding may decide.
TIE = 1e-3
# Logits reach 45; rounding in float32 over 30 layers makes differences of up to 2e-4.
MAX_DIFFERENCE = 5e-4
PROMPTS = (
    "Once upon a time there was a king who had 3 daughters. The eldest was called Anna, and she "
    "lived in a small house by the sea. One day a ship came, and on it was a young man who",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number, counted from 0.'''\n"
    "    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nName 5 rivers of Europe and the seas they flow into, one in each line, "
    "without any other words.<|im_end|>\n<|im_start|>assistant\n",
)


@dataclass(frozen=True)
class Reference:
    tensors: dict[str, Tensor]
    model: torch.nn.Module

    def logits(self, token_ids: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits


@pytest.fixture(scope="module")
def reference() -> Reference:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    )
    load: Callable[..., dict[str, dict[str, Any]]] = load_gguf_checkpoint
    read = load(str(smollm2_path()), return_tensors=True, model_to_load=model)
    tensors = {name: torch.as_tensor(tensor) for name, tensor in read["tensors"].items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied to the embedding
    return Reference(tensors, model)


@pytest.fixture(scope="module")
def llama(smollm2: LoadedModel) -> Llama:
    return Llama(smollm2.config, smollm2.weights)


def step(llama: Llama, pool: Tensor, token_ids: list[int], start: int) -> Tensor:
    row = plan_row(token_ids, [11, 3, 7, 0, 9, 2, 10, 5], start=start)
    with torch.inference_mode():
        batch = build_batch([row], llama.config, num_blocks=12, block_size=BLOCK_SIZE)
        return llama.forward(batch, pool)[0]


def new_pool(llama: Llama) -> Tensor:
    return KvCache.allocate(llama.config, num_blocks=12, block_size=BLOCK_SIZE).pool


def test_dequantised_weights_are_bit_identical(llama: Llama, reference: Reference) -> None:
    ours, theirs = llama.weights, reference.tensors
    assert torch.equal(ours.embedding, theirs["model.embed_tokens.weight"])
    assert torch.equal(ours.final_norm, theirs["model.norm.weight"])
    for i, layer in enumerate(ours.layers):

        def their(*names: str, i: int = i) -> Tensor:
            return torch.cat([theirs[f"model.layers.{i}.{name}.weight"] for name in names])

        attention = [f"self_attn.{part}_proj" for part in ("q", "k", "v")]
        assert torch.equal(layer.qkv, their(*attention))
        assert torch.equal(layer.attention_output, their("self_attn.o_proj"))
        assert torch.equal(layer.gate_up, their("mlp.gate_proj", "mlp.up_proj"))
        assert torch.equal(layer.down, their("mlp.down_proj"))
        assert torch.equal(layer.attention_norm, their("input_layernorm"))
        assert torch.equal(layer.mlp_norm, their("post_attention_layernorm"))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_text_are_the_references(
    smollm2: LoadedModel, llama: Llama, reference: Reference, prompt: str
) -> None:
    prompt_ids = smollm2.tokenizer.encode(prompt)
    pool = new_pool(llama)
    ours = [step(llama, pool, prompt_ids, 0)]
    tokens = [*prompt_ids, int(ours[0].argmax())]
    for _ in range(49):
        ours.append(step(llama, pool, tokens[-1:], len(tokens) - 1))
        tokens.append(int(ours[-1].argmax()))

    # The reference reads what we wrote, so that a tie that falls otherwise doesn't end the test.
    theirs = reference.logits(tokens)[len(prompt_ids) - 1 : -1]
    assert (torch.stack(ours) - theirs).abs().max() < MAX_DIFFERENCE
    best = theirs.topk(2)
    is_tie = best.values[:, 0] - best.values[:, 1] < TIE
    is_same = best.indices[:, 0] == torch.tensor(tokens[len(prompt_ids) :])
    assert bool((is_same | is_tie).all())
    assert int(is_tie.sum()) < 5
