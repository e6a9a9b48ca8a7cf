"""Model files written from tensors, as converters and `save_pretrained` write them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_testing.models import (
    CHAT_TEMPLATE,
    MERGES,
    SPECIAL_TOKENS,
    TINY,
    VOCABULARY,
    tiny_backend,
)

_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Hugging Face's name of a tensor to GGUF's."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES.get(part, part)}.{suffix}"


def quantised(weight: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Return what a file of this kind makes of a weight, as plain numbers."""
    values = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind)
    return torch.from_numpy(np.array(values, np.float32))


def write_gguf(
    path: Path,
    tensors: dict[str, Tensor],
    *,
    config: LlamaConfig = TINY,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.Q8_0,
    add: Callable[[GGUFWriter], None] = lambda _: None,
) -> Path:
    """Write a model as llama.cpp's converter does: query and key rows permuted in Llamas, matrices
    in `kind`. `add` may add more.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    if config.head_size * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_size)
        writer.add_value_length(config.head_size)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    write_tiny_tokenizer(writer)
    add(writer)
    for name, tensor in tensors.items():
        own = gguf_name(name)
        if architecture == "llama" and own.endswith("attn_q.weight"):
            tensor = _permute(tensor, config.num_heads)
        elif architecture == "llama" and own.endswith("attn_k.weight"):
            tensor = _permute(tensor, config.num_kv_heads)
        if tensor.dim() == 2:
            packed = gguf.quants.quantize(tensor.numpy(), kind)
            writer.add_tensor(own, packed, raw_dtype=kind)
        else:
            writer.add_tensor(own, tensor.numpy())
    finish(writer)
    return path


def write_tiny_tokenizer(
    writer: GGUFWriter, *, pre_tokenizer: str = "smollm", adds_bos: bool | None = None
) -> None:
    """The tokenizer of `tiny_tokenizer`."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([*VOCABULARY])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in VOCABULARY])
    writer.add_token_merges([*MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)


def finish(writer: GGUFWriter) -> None:
    """Write everything out and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_context_tokens,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_epsilon,
        "tie_word_embeddings": config.has_tied_embeddings,
        "eos_token_id": [2, 0],
        **(overrides or {}),
    }
    write_json(path / "config.json", content)
    settings = {"chat_template": CHAT_TEMPLATE, "eos_token": {"content": "<|im_end|>"}}
    write_json(path / "tokenizer_config.json", settings)
    tiny_backend().save(str(path / "tokenizer.json"))
    save_file(tensors, path / "model.safetensors")
    return path


def shard(directory: Path) -> Path:
    """Spread a directory's weights over two files and an index; returns the index."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part in (0, 1):
        file = f"model-0000{part + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names[part::2]}, directory / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    index = directory / "model.safetensors.index.json"
    write_json(index, {"metadata": {}, "weight_map": weight_map})
    return index


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _permute(tensor: Tensor, heads: int) -> Tensor:
    rows, columns = tensor.shape
    halves = tensor.view(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns).contiguous()
