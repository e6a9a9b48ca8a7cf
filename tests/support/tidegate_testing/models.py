"""Models for tests: tiny ones made up on the spot, and SmolLM2."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
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

_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_tensors(config: LlamaConfig = TINY, seed: int = 0) -> dict[str, Tensor]:
    """Weights of a model under Hugging Face's names, large enough that outputs differ clearly."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    def norm() -> Tensor:
        return 1.0 + 0.1 * torch.randn(config.hidden_size, generator=generator)

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
    tensors["model.norm.weight"] = norm()
    if not config.has_tied_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden)
    return tensors


class TensorTable:
    """A `TensorSource` in memory."""

    path = Path("memory")

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def unread(self) -> tuple[str, ...]:
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
    tensors = assemble(config, TensorTable(random_tensors(config, seed)))
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


def gguf_name(name: str) -> str:
    """Hugging Face's name of a tensor to GGUF's."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part = rest.removesuffix(".weight")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES.get(part, part)}.weight"


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    config: LlamaConfig = TINY,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    adds_bos: bool = False,
) -> Path:
    """Write a model as llama.cpp's converter does: query and key rows permuted, matrices in Q8_0
    where the row length allows it.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([*VOCABULARY])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in VOCABULARY])
    writer.add_token_merges([*MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(adds_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in tensors.items():
        own = gguf_name(name)
        if own.endswith("attn_q.weight"):
            tensor = _permute(tensor, config.num_heads)
        elif own.endswith("attn_k.weight"):
            tensor = _permute(tensor, config.num_kv_heads)
        if tensor.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            writer.add_tensor(own, packed, raw_dtype=kind)
        else:
            writer.add_tensor(own, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf_directory(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    config: LlamaConfig = TINY,
    overrides: Mapping[str, object] | None = None,
) -> Path:
    """Write a model as `save_pretrained` does."""
    path.mkdir()
    content = {
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context_tokens,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_epsilon,
        "tie_word_embeddings": config.has_tied_embeddings,
        "eos_token_id": [2, 0],
        **(overrides or {}),
    }
    (path / "config.json").write_text(json.dumps(content))
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    tiny_backend().save(str(path / "tokenizer.json"))
    save_file(tensors, path / "model.safetensors")
    return path


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


def _permute(tensor: Tensor, heads: int) -> Tensor:
    rows, columns = tensor.shape
    halves = tensor.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()
