"""The forward pass in PyTorch's operations: on any device, in any dtype."""

import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cuda_attention import Attentions
from tidegate_engine.model.layers import Layer, Layers
from tidegate_engine.model.linear import Linear
from tidegate_engine.model.rotary import RotaryTable


class PortableForward:
    """A `ForwardPass` without kernels of its own."""

    def __init__(self, config: LlamaConfig, layers: Layers[Linear], rotary: RotaryTable) -> None:
        self._config = config
        self._layers = layers
        self._rotary = rotary
        embedding = layers.embedding
        self._attentions = Attentions(config, embedding.device, embedding.dtype)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step."""
        turn = self._rotary.at(batch.positions)
        attention = self._attentions.begin(pool, batch)
        hidden = functional.embedding(batch.token_ids, self._layers.embedding)
        for i, layer in enumerate(self._layers.layers):
            normed = self._norm(hidden, layer.attention_norm)
            query, key, value = self._project(layer, turn, normed)
            attended = attention.attend(i, query, key, value)
            hidden = hidden + layer.attention_output.multiply(attended)
            hidden = hidden + _mlp(layer, self._norm(hidden, layer.mlp_norm))
        last = self._norm(hidden.index_select(0, batch.sampled), self._layers.final_norm)
        return self._layers.output.multiply(last)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_epsilon)

    def _project(
        self, layer: Layer[Linear], turn: RotaryTable, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D] and keys [T, K, D], rotated, and values [T, K, D]."""
        projected = layer.qkv.multiply(hidden)
        if layer.qkv_bias is not None:
            projected = projected + layer.qkv_bias
        heads = projected.view(len(hidden), -1, self._config.head_size)
        num_queries, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(heads[:, :num_queries], layer.query_norm)
            keys = self._norm(heads[:, num_queries:-num_kv_heads], layer.key_norm)
            heads = torch.cat((queries, keys, heads[:, -num_kv_heads:]), dim=1)
        rotated = turn.rotate(heads[:, : num_queries + num_kv_heads])
        return rotated[:, :num_queries], rotated[:, num_queries:], heads[:, -num_kv_heads:]


def _mlp(layer: Layer[Linear], hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up.multiply(hidden).chunk(2, dim=-1)
    return layer.down.multiply(functional.silu(gate) * up)
