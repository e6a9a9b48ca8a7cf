"""The tensors of a Llama-family model, in the form that the forward pass uses."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
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

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors; an output that is the embedding counts once."""
        parts: tuple[LlamaWeights | LayerWeights, ...] = (self, *self.layers)
        values = [getattr(part, field.name) for part in parts for field in fields(part)]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return sum({tensor.data_ptr(): tensor.numel() for tensor in tensors}.values())


class TensorSource(Protocol):
    """A model file, read tensor by tensor under Hugging Face's names."""

    def locate(self, name: str) -> tuple[Path, str]:
        """Return the file of a tensor and its name there, for messages; it needn't exist."""
        ...

    def read(self, name: str) -> Tensor:
        """Return a tensor, its rows in Hugging Face's order, in any floating point dtype.

        It may be a view of the file, and isn't written to.

        Raises:
            ModelLoadError: There is none of that name, or it can't be read.
        """
        ...

    def unread(self) -> Sequence[tuple[Path, str]]:
        """File and name there of the tensors that `read` never returned."""
        ...


# Name of a tensor as a source has it, and its shape.
_Part = tuple[str, tuple[int, ...]]


def assemble(
    config: LlamaConfig,
    source: TensorSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Read a model into fused tensors, one after the other, named as `from_tensors` takes them.

    No more than one of them is held beside those that the caller keeps. Where a tensor is needed
    as the source has it, it is the source's own, not a copy.

    Raises:
        ModelLoadError: A tensor is missing, has the wrong shape, or has no place in the model
            (biases, say: leaving them out would change every output without a word).
    """
    for name, parts in _layout(config):
        tensors = [source.read(part) for part, _ in parts]
        for (part, shape), tensor in zip(parts, tensors, strict=True):
            _check_shape(*source.locate(part), tensor, shape)
        if len(parts) == 1:
            yield name, tensors[0].to(device=device, dtype=dtype)
            continue
        whole = torch.empty(_fused_shape(parts), dtype=dtype, device=device)
        places = torch.split(whole, [len(tensor) for tensor in tensors])
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor)
        yield name, whole
    if unread := source.unread():
        path, name = unread[0]
        problem = f"has no place in a model of this architecture ({len(unread)} such tensors)"
        raise ModelLoadError(path, problem, tensor=name)


def from_tensors(config: LlamaConfig, tensors: Mapping[str, Tensor], path: Path) -> LlamaWeights:
    """Give the tensors that `assemble` read from `path` their structure, without copying them.

    Raises:
        ModelLoadError: A tensor is missing or has the wrong shape.
    """
    shapes = {name: _fused_shape(parts) for name, parts in _layout(config)}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelLoadError(path, "is missing", tensor=name)
        _check_shape(path, name, tensors[name], shape)
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


def _layout(config: LlamaConfig) -> Iterator[tuple[str, tuple[_Part, ...]]]:
    """Every fused tensor, and what it consists of, one part below the other."""
    hidden = config.hidden_size
    yield "embedding", (("model.embed_tokens.weight", (config.vocab_size, hidden)),)
    for i in range(config.num_layers):
        for field, parts in _layer_layout(config).items():
            yield (
                f"layers.{i}.{field}",
                tuple((f"model.layers.{i}.{part}", shape) for part, shape in parts),
            )
    yield "final_norm", (("model.norm.weight", (hidden,)),)
    if not config.has_tied_embeddings:
        yield "output", (("lm_head.weight", (config.vocab_size, hidden)),)


def _layer_layout(config: LlamaConfig) -> dict[str, tuple[_Part, ...]]:
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_size
    heads = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}

    def projections(suffix: str, *shape: int) -> tuple[_Part, ...]:
        return tuple((f"self_attn.{x}_proj.{suffix}", (heads[x], *shape)) for x in heads)

    layout: dict[str, tuple[_Part, ...]] = {
        "attention_norm": (("input_layernorm.weight", (hidden,)),),
        "qkv": projections("weight", hidden),
        "attention_output": (("self_attn.o_proj.weight", (hidden, config.query_size)),),
        "mlp_norm": (("post_attention_layernorm.weight", (hidden,)),),
        "gate_up": tuple((f"mlp.{x}_proj.weight", (wide, hidden)) for x in ("gate", "up")),
        "down": (("mlp.down_proj.weight", (hidden, wide)),),
    }
    if config.has_qkv_bias:
        layout["qkv_bias"] = projections("bias")
    if config.has_qk_norm:
        layout["query_norm"] = (("self_attn.q_norm.weight", (head,)),)
        layout["key_norm"] = (("self_attn.k_norm.weight", (head,)),)
    return layout


def _fused_shape(parts: tuple[_Part, ...]) -> tuple[int, ...]:
    _, (_, *columns) = parts[0]
    return (sum(shape[0] for _, shape in parts), *columns)


def _check_shape(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelLoadError(
            path,
            f"has shape {list(tensor.shape)}, the configuration says {list(shape)}",
            tensor=name,
        )
