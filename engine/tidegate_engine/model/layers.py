"""A model's weights as the forward pass uses them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from tidegate_engine.model.linear import Linear
from tidegate_engine.model.weights import LayerWeights, LlamaWeights

LinearT = TypeVar("LinearT", bound=Linear, covariant=True)

NewLinear = Callable[[Tensor], LinearT]
"""Lays out a weight [outputs, inputs]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[LinearT]):
    """One decoder layer; `model.weights.LayerWeights` says what its tensors are."""

    attention_norm: Tensor
    qkv: LinearT
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: LinearT
    mlp_norm: Tensor
    gate_up: LinearT
    down: LinearT

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it keeps in memory."""
        linears = (self.qkv, self.attention_output, self.gate_up, self.down)
        own = (
            self.attention_norm,
            self.qkv_bias,
            self.query_norm,
            self.key_norm,
            self.mlp_norm,
        )
        return tuple(tensor for tensor in own if tensor is not None) + tuple(
            tensor for linear in linears for tensor in linear.tensors
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers(Generic[LinearT]):
    """All of a model."""

    embedding: Tensor
    layers: tuple[Layer[LinearT], ...]
    final_norm: Tensor
    output: LinearT

    @property
    def num_bytes(self) -> int:
        """Memory that all of it takes; an output that is the embedding takes none."""
        tensors = [self.embedding, self.final_norm, *self.output.tensors]
        for layer in self.layers:
            tensors += layer.tensors
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @classmethod
    def pack(cls, weights: LlamaWeights, new_linear: NewLinear[LinearT]) -> "Layers[LinearT]":
        """Lay the weights out.

        On a CPU what stays as it is is copied: it may lie in a mapped file, of which as much as was
        ever read would stay in memory with it.
        """
        return cls(
            embedding=_own(weights.embedding),
            layers=tuple(_pack(layer, new_linear) for layer in weights.layers),
            final_norm=_own(weights.final_norm),
            output=new_linear(weights.output),
        )


def _pack(layer: LayerWeights, new_linear: NewLinear[LinearT]) -> Layer[LinearT]:
    return Layer(
        attention_norm=_own(layer.attention_norm),
        qkv=new_linear(layer.qkv),
        qkv_bias=_own_or_none(layer.qkv_bias),
        query_norm=_own_or_none(layer.query_norm),
        key_norm=_own_or_none(layer.key_norm),
        attention_output=new_linear(layer.attention_output),
        mlp_norm=_own(layer.mlp_norm),
        gate_up=new_linear(layer.gate_up),
        down=new_linear(layer.down),
    )


def _own(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def _own_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _own(tensor)
