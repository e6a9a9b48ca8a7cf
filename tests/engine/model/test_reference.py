"""SmolLM2 against `transformers`, which reads the same GGUF file with its own code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import LoadedModel, smollm2_path
from tidegate_testing.greedy import continue_greedily

pytestmark = pytest.mark.reference

# Below this gap between the two best logits, rounding may decide.
TIE = 1e-3
# Logits reach 45; rounding in float32 over 30 layers made differences of up to 4e-5.
MAX_DIFFERENCE = 2e-4
NEW_TOKENS = 200
# Logits are compared at every so many tokens: all of them would take 800 MB.
EVERY = 10
TEXTS = (
    "Once upon a time there was a king who had 3 daughters. The eldest was called Anna, and she "
    "lived in a small house by the sea. One day a ship came, and on it was a young man who",
    "def fibonacci(n):\n    '''Return the n-th Fibonacci number, counted from 0.'''\n"
    "    if n < 2:\n        return n\n    return",
    "The three largest cities of Japan are",
    "Der schnelle braune Fuchs",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, columns):\n",
    "| planet | moons |\n|---|---|\n| Mercury | 0 |\n| Venus | 0 |\n| Earth |",
    "To be, or not to be, that is the question:",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "In 1905 Albert Einstein published four papers, of which the first",
    "A",
)
QUESTIONS = (
    "Name 5 rivers of Europe and the seas they flow into, one in each line, without any other "
    "words.",
    "What is the capital of France?",
    "Write a poem about the autumn.",
    "Explain photosynthesis to a child.",
    "How do I reverse a list in Python?",
    "Translate 'good morning' into Spanish, Italian and Portuguese.",
    "I have 12 apples and give away a third of them. How many are left?",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "Which is heavier, a kilogram of feathers or a kilogram of iron?",
    "Give me a recipe for pancakes.",
)


@dataclass(frozen=True)
class Reference:
    tensors: dict[str, Tensor]
    model: torch.nn.Module

    def logits(self, token_ids: list[int], num_last: int) -> Tensor:
        """Of the last positions [num_last, vocabulary]."""
        with torch.inference_mode():
            logits: Tensor = self.model(
                torch.tensor([token_ids]), logits_to_keep=num_last, use_cache=False
            ).logits[0]
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
def prompts(smollm2: LoadedModel) -> list[list[int]]:
    tokenizer = smollm2.tokenizer
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS
    ]
    return [*map(tokenizer.encode, TEXTS), *chats]


def test_dequantised_weights_are_bit_identical(smollm2: LoadedModel, reference: Reference) -> None:
    ours, theirs = smollm2.weights, reference.tensors
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


# A minute on one core of one's own, of which others may leave little.
@pytest.mark.timeout(1800)
def test_logits_and_greedy_text_are_the_references(
    smollm2: LoadedModel,
    reference: Reference,
    prompts: list[list[int]],
    record_property: Callable[[str, object], None],
) -> None:
    llama = Llama(smollm2.config, smollm2.weights)
    sequences, ours = continue_greedily(llama, prompts, count=NEW_TOKENS, every=EVERY)
    num_ties, largest = 0, 0.0
    for sequence, logits in zip(sequences, ours, strict=True):
        # The reference reads what we wrote: where its choice is ours at every token, its own text
        # would have been the same; and a tie that falls otherwise doesn't end the comparison.
        theirs = reference.logits(sequence, NEW_TOKENS + 1)[:-1]
        largest = max(largest, float((logits - theirs[::EVERY]).abs().max()))
        best = theirs.topk(2)
        is_tie = best.values[:, 0] - best.values[:, 1] < TIE
        is_same = best.indices[:, 0] == torch.tensor(sequence[-NEW_TOKENS:])
        assert bool((is_same | is_tie).all())
        num_ties += int(is_tie.sum())
    record_property("largest_logit_difference", largest)
    assert largest < MAX_DIFFERENCE
    assert num_ties < len(prompts) * NEW_TOKENS // 100
