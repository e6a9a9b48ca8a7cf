"""A model's weights as the forward pass uses them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tidegate_engine.model.linear import Linear
from tidegate_engine.model.weights import LayerWeights, LlamaWeights

NewLinear = Callable[[Tensor], Linear]
"""Lays out a weight [outputs, inputs]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer; `model.weights.LayerWeights` says what its tensors are."""

    attention_norm: Tensor
    qkv: Linear
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """All of a model."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    output: Linear

    @classmethod
    def pack(cls, weights: LlamaWeights, new_linear: NewLinear) -> "Layers":
        """Lay the weights out.

        Tensors that stay as they are are copied: they may lie in a mapped file, of which as much as
        was ever read would stay in memory with them.
        """
        return cls(
            embedding=weights.embedding.clone(),
            layers=tuple(_pack(layer, new_linear) for layer in weights.layers),
            final_norm=weights.final_norm.clone(),
            output=new_linear(weights.output),
        )


def _pack(layer: LayerWeights, new_linear: NewLinear) -> Layer:
    return Layer(
        attention_norm=layer.attention_norm.clone(),
        qkv=new_linear(layer.qkv),
        qkv_bias=_copy(layer.qkv_bias),
        query_norm=_copy(layer.query_norm),
        key_norm=_copy(layer.key_norm),
        attention_output=new_linear(layer.attention_output),
        mlp_norm=layer.mlp_norm.clone(),
        gate_up=new_linear(layer.gate_up),
        down=new_linear(layer.down),
    )


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
