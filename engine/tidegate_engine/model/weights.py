"""The tensors of a Llama-family model, in the form that the forward pass uses."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.errors import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs].

    Attributes:
        qkv: Query, key and value projections, one below the other: [(H + 2K) * D, hidden].
        qkv_bias: Added to what `qkv` gives [(H + 2K) * D]; None in models without.
        query_norm: Scales every query head once it is normalised [D]; None in models without.
        key_norm: The same for key heads.
        gate_up: Gate and up projections, one below the other: [2 * intermediate, hidden].
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    qkv_bias: Tensor | None = None
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All tensors of one model, on one device in one dtype.

    Attributes:
        output: Projection to logits [vocabulary, hidden]; the embedding itself when tied.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    output: Tensor


class TensorSource(Protocol):
    """A model file, read tensor by tensor under Hugging Face's names."""

    @property
    def path(self) -> Path:
        """For messages."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor in float32, its rows in Hugging Face's order.

        Raises:
            ModelLoadError: There is none of that name, or it can't be read.
        """
        ...

    def unread(self) -> tuple[str, ...]:
        """Names of the tensors that `read` never returned, in the source's own words."""
        ...


def assemble(config: LlamaConfig, source: TensorSource) -> dict[str, Tensor]:
    """Read a model into fused tensors, named as `from_tensors` takes them.

    Raises:
        ModelLoadError: A tensor is missing, has the wrong shape, or has no place in the model
            (biases, say: leaving them out would change every output without a word).
    """
    hidden, wide = config.hidden_size, config.intermediate_size

    def read(name: str, *shape: int) -> Tensor:
        tensor = source.read(name)
        check_shape(source.path, name, tensor, shape)
        return tensor

    tensors = {"embedding": read("model.embed_tokens.weight", config.vocab_size, hidden)}
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        query = read(f"{attention}.q_proj.weight", config.query_size, hidden)
        key = read(f"{attention}.k_proj.weight", config.kv_size, hidden)
        value = read(f"{attention}.v_proj.weight", config.kv_size, hidden)
        gate = read(f"{mlp}.gate_proj.weight", wide, hidden)
        up = read(f"{mlp}.up_proj.weight", wide, hidden)
        tensors |= {
            f"{ours}.attention_norm": read(f"{theirs}.input_layernorm.weight", hidden),
            f"{ours}.qkv": torch.cat((query, key, value)),
            f"{ours}.attention_output": read(
                f"{attention}.o_proj.weight", hidden, config.query_size
            ),
            f"{ours}.mlp_norm": read(f"{theirs}.post_attention_layernorm.weight", hidden),
            f"{ours}.gate_up": torch.cat((gate, up)),
            f"{ours}.down": read(f"{mlp}.down_proj.weight", hidden, wide),
        }
        if config.has_qkv_bias:
            query_bias = read(f"{attention}.q_proj.bias", config.query_size)
            key_bias = read(f"{attention}.k_proj.bias", config.kv_size)
            value_bias = read(f"{attention}.v_proj.bias", config.kv_size)
            tensors[f"{ours}.qkv_bias"] = torch.cat((query_bias, key_bias, value_bias))
        if config.has_qk_norm:
            tensors[f"{ours}.query_norm"] = read(f"{attention}.q_norm.weight", config.head_size)
            tensors[f"{ours}.key_norm"] = read(f"{attention}.k_norm.weight", config.head_size)
    tensors["final_norm"] = read("model.norm.weight", hidden)
    if not config.has_tied_embeddings:
        tensors["output"] = read("lm_head.weight", config.vocab_size, hidden)
    if unread := source.unread():
        raise ModelLoadError(
            source.path,
            f"has no place in a plain Llama model ({len(unread)} such tensors)",
            tensor=unread[0],
        )
    return tensors


def from_tensors(config: LlamaConfig, tensors: Mapping[str, Tensor], path: Path) -> LlamaWeights:
    """Give the tensors that `assemble` read from `path` their structure, without copying them.

    Raises:
        ModelLoadError: A tensor is missing or has the wrong shape.
    """
    shapes = dict(fused_shapes(config))
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelLoadError(path, "is missing", tensor=name)
        check_shape(path, name, tensors[name], shape)
    embedding = tensors["embedding"]
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LayerWeights(
                **{
                    field: tensors[name]
                    for field in LayerWeights.__slots__
                    if (name := f"layers.{i}.{field}") in shapes
                }
            )
            for i in range(config.num_layers)
        ),
        final_norm=tensors["final_norm"],
        output=embedding if config.has_tied_embeddings else tensors["output"],
    )


def fused_shapes(config: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that `from_tensors` needs."""
    hidden, wide = config.hidden_size, config.intermediate_size
    yield "embedding", (config.vocab_size, hidden)
    for i in range(config.num_layers):
        yield f"layers.{i}.attention_norm", (hidden,)
        yield f"layers.{i}.qkv", (config.query_size + 2 * config.kv_size, hidden)
        yield f"layers.{i}.attention_output", (hidden, config.query_size)
        yield f"layers.{i}.mlp_norm", (hidden,)
        yield f"layers.{i}.gate_up", (2 * wide, hidden)
        yield f"layers.{i}.down", (hidden, wide)
        if config.has_qkv_bias:
            yield f"layers.{i}.qkv_bias", (config.query_size + 2 * config.kv_size,)
        if config.has_qk_norm:
            yield f"layers.{i}.query_norm", (config.head_size,)
            yield f"layers.{i}.key_norm", (config.head_size,)
    yield "final_norm", (hidden,)
    if not config.has_tied_embeddings:
        yield "output", (config.vocab_size, hidden)


def check_shape(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError when a tensor isn't of the shape that the configuration says."""
    if tuple(tensor.shape) != shape:
        raise ModelLoadError(
            path,
            f"has shape {list(tensor.shape)}, the configuration says {list(shape)}",
            tensor=name,
        )
