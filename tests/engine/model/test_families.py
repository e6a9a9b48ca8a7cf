"""Every family that can be served, against `transformers`: tiny models with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import load_model
from tidegate_testing.greedy import continue_greedily
from tidegate_testing.models import VOCABULARY, tiny_backend

pytestmark = pytest.mark.reference

# Below this gap between the two best logits, rounding may decide.
TIE = 1e-3
# Logits reach 20.
MAX_DIFFERENCE = 1e-4
PROMPT_TOKENS, NEW_TOKENS = (70, 5, 33), 30
CONTEXT = 128
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Family:
    """A model as `transformers` builds it, tiny."""

    architecture: str
    heads: int = 4
    kv_heads: int = 2
    head_size: int | None = None
    is_tied: bool = False
    rope: dict[str, Any] | None = None
    fields: dict[str, Any] | None = None

    def build(self) -> transformers.PreTrainedModel:
        kinds: dict[str, Callable[[Any], transformers.PreTrainedModel]] = {
            "llama": transformers.LlamaForCausalLM,
            "mistral": transformers.MistralForCausalLM,
            "qwen2": transformers.Qwen2ForCausalLM,
            "qwen3": transformers.Qwen3ForCausalLM,
        }
        config = transformers.AutoConfig.for_model(
            self.architecture,
            vocab_size=len(VOCABULARY),
            hidden_size=16 * self.heads,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=self.is_tied,
            rope_parameters=self.rope or {"rope_type": "default", "rope_theta": 10_000.0},
            **({} if self.head_size is None else {"head_dim": self.head_size}),
            **(self.fields or {}),
        )
        model = kinds[self.architecture](config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                noise = torch.randn(tensor.shape, generator=generator)
                if "norm" in name:
                    tensor.copy_(1 + 0.2 * noise)
                else:
                    tensor.copy_(noise * 1.5 / tensor.shape[-1] ** 0.5)
        return model


FAMILIES = {
    "Llama 2": Family("llama", kv_heads=4),
    "Llama 3": Family("llama", rope={"rope_type": "default", "rope_theta": 500_000.0}),
    "Llama 3.1": Family("llama", rope=LLAMA_3),
    "Llama, linear": Family(
        "llama", rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    ),
    "Llama, YaRN": Family("llama", rope=YARN),
    "SmolLM2": Family("llama", heads=9, kv_heads=3, is_tied=True),
    "TinyLlama": Family("llama", heads=8, kv_heads=1),
    "Mistral": Family("mistral", head_size=8, fields={"sliding_window": None}),
    "Qwen2": Family("qwen2", is_tied=True),
    "Qwen2, YaRN": Family("qwen2", rope={**YARN, "attention_factor": 1.3, "beta_fast": 16.0}),
    "Qwen3": Family("qwen3", head_size=24, is_tied=True),
    "Qwen3, untied": Family("qwen3", head_size=16),
}


def save(model: transformers.PreTrainedModel, path: Path, **options: Any) -> Path:
    model.save_pretrained(path, **options)
    tiny_backend().save(str(path / "tokenizer.json"))
    return path


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(3, len(VOCABULARY), (length,), generator=generator).tolist()
        for length in lengths
    ]


def compare(directory: Path, model: transformers.PreTrainedModel, *lengths: int) -> None:
    loaded = load_model(str(directory), directory / "unused")
    llama = Llama(loaded.config, loaded.weights)
    tokens, ours = continue_greedily(llama, prompts(*lengths), count=NEW_TOKENS)
    for length, sequence, logits in zip(lengths, tokens, ours, strict=True):
        # The reference reads what we wrote, so that a tie that falls otherwise doesn't end it.
        with torch.inference_mode():
            theirs = model(torch.tensor([sequence])).logits[0, length - 1 : -1]
        assert (logits - theirs).abs().max() < MAX_DIFFERENCE
        best = theirs.topk(2)
        is_tie = best.values[:, 0] - best.values[:, 1] < TIE
        is_same = best.indices[:, 0] == torch.tensor(sequence[length:])
        assert bool((is_same | is_tie).all())
        assert int(is_tie.sum()) < NEW_TOKENS // 3


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_text_are_the_references(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].build()
    compare(save(model, tmp_path / "model"), model, *PROMPT_TOKENS)


def test_shards_in_half_precision_are_one_model(tmp_path: Path) -> None:
    stored, model = (FAMILIES["Qwen2"].build() for _ in range(2))
    directory = save(stored.bfloat16(), tmp_path / "model", max_shard_size="40KB")
    assert len([*directory.glob("*.safetensors")]) > 2
    # Both compute in float32, from the rounded weights. Not `stored.float()`: that one's rotary
    # frequencies are rounded too.
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    compare(directory, model, *PROMPT_TOKENS)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("mistral", {"sliding_window": 48}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}),
    ],
)
def test_up_to_its_window_a_sliding_model_is_a_plain_one(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    family = replace(Family(architecture), fields=fields)
    model = family.build()
    directory = save(model, tmp_path / "model")
    assert load_model(str(directory), tmp_path).config.max_context_tokens == 48
    compare(directory, model, 48 - NEW_TOKENS, 3)
