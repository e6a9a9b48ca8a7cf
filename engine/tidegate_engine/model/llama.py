"""The forward pass of the Llama family, once for a whole step.

Tokens of all rows lie one after the other; only attention knows which belong together.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model.attention import PagedAttention
from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.rotary import RotaryTable
from tidegate_engine.model.weights import LayerWeights, LlamaWeights


class Llama:
    """A model of the Llama family, ready to compute steps."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self._rotary = RotaryTable.of(config, weights.embedding)

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step; its keys and values are written into `pool` [N, L, 2, B, K, D].

        Returns:
            Logits of the rows that sample [rows, vocabulary]; of the others none are computed.
        """
        turn = self._rotary.at(batch.positions)
        attention = PagedAttention(pool, batch)
        hidden = functional.embedding(batch.token_ids, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            normed = self._norm(hidden, layer.attention_norm)
            query, key, value = self._project(layer, turn, normed)
            attended = attention.attend(i, query, key, value)
            hidden = hidden + functional.linear(attended, layer.attention_output)
            hidden = hidden + _mlp(layer, self._norm(hidden, layer.mlp_norm))
        last = self._norm(hidden.index_select(0, batch.sampled), self.weights.final_norm)
        return functional.linear(last, self.weights.output)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_epsilon)

    def _project(
        self, layer: LayerWeights, turn: RotaryTable, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [T, H, D] and keys [T, K, D], rotated, and values [T, K, D]."""
        projected = functional.linear(hidden, layer.qkv, layer.qkv_bias)
        heads = projected.view(len(hidden), -1, self.config.head_size)
        num_queries, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._norm(heads[:, :num_queries], layer.query_norm)
            keys = self._norm(heads[:, num_queries:-num_kv_heads], layer.key_norm)
            heads = torch.cat((queries, keys, heads[:, -num_kv_heads:]), dim=1)
        rotated = turn.rotate(heads[:, : num_queries + num_kv_heads])
        return rotated[:, :num_queries], rotated[:, num_queries:], heads[:, -num_kv_heads:]


def _mlp(layer: LayerWeights, hidden: Tensor) -> Tensor:
    gate, up = functional.linear(hidden, layer.gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, layer.down)
