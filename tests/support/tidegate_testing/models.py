"""Models for tests: tiny ones made up on the spot, and SmolLM2."""

import math
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.core.sampling import SamplingParams
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.loader import LoadedModel, load_model
from tidegate_engine.model.tokenizer import Tokenizer
from tidegate_engine.model.weights import assemble, from_tensors
from tidegate_testing.sampling import a_context

# The byte alphabet of byte-level BPE, three special tokens, and what the merges make.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "4 2")
VOCABULARY = (
    *SPECIAL_TOKENS,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'fool' %}"
    "{{ raise_exception('no fools') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY = LlamaConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    intermediate_size=64,
    vocab_size=len(VOCABULARY),
    max_context_tokens=512,
    rope_theta=10_000.0,
    rms_norm_epsilon=1e-5,
    has_tied_embeddings=True,
)


def random_tensors(config: LlamaConfig = TINY, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a model under Hugging Face's names, large enough that outputs differ clearly."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm(size: int = config.hidden_size) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    hidden, wide = config.hidden_size, config.intermediate_size
    tensors = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden) * 8}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": 2 * matrix(config.query_size, hidden),
            f"{layer}.self_attn.k_proj.weight": 2 * matrix(config.kv_size, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(config.kv_size, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, config.query_size),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.mlp.gate_proj.weight": matrix(wide, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(wide, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, wide),
        }
        if config.has_qkv_bias:
            for part, size in zip("qkv", (config.query_size, *[config.kv_size] * 2), strict=True):
                tensors[f"{layer}.self_attn.{part}_proj.bias"] = matrix(1, size)[0] * 4
        if config.has_qk_norm:
            for part in "qk":
                tensors[f"{layer}.self_attn.{part}_norm.weight"] = norm(config.head_size)
    tensors["model.norm.weight"] = norm()
    if not config.has_tied_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return tensors


class TensorTable:
    """A `TensorSource` in memory."""

    path = Path("memory")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def locate(self, name: str) -> tuple[Path, str]:
        return self.path, name

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def unread(self) -> tuple[tuple[Path, str], ...]:
        return ()


def tiny_backend() -> Backend:
    """A tokenizer of the vocabulary above, as `tokenizers` has it."""
    ids = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Backend(models.BPE(ids, [(left, right) for left, right in map(str.split, MERGES)]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*SPECIAL_TOKENS])
    return backend


def tiny_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    return Tokenizer(tiny_backend(), chat_template=chat_template, eos_token_ids=frozenset({2}))


def tiny_model(config: LlamaConfig = TINY, seed: int = 0) -> LoadedModel:
    tensors = dict(assemble(config, TensorTable(random_tensors(config, seed))))
    weights = from_tensors(config, tensors, TensorTable.path)
    return LoadedModel(config=config, weights=weights, tokenizer=tiny_tokenizer())


def plan_row(
    token_ids: list[int],
    block_ids: list[int],
    *,
    request_id: str = "r",
    start: int = 0,
    samples: bool = True,
    is_decode: bool = False,
    sampling: SamplingParams | None = None,
) -> PlanRow:
    """A row of a step, greedy unless told otherwise."""
    return PlanRow(
        request_id=request_id,
        start=start,
        token_ids=token_ids,
        block_ids=block_ids,
        samples=samples,
        is_decode=is_decode,
        sampling=a_context(sampling or SamplingParams(temperature=0.0), [*[0] * start, *token_ids]),
    )


def model_cache_dir() -> Path:
    """Where converted models are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tidegate" / "models"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """SmolLM2-135M-Instruct in float32."""
    return load_model("smollm2", model_cache_dir())


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """A second thread spins as soon as anything else wants its core."""
    torch.set_num_threads(1)
