"""The forward pass of the Llama family, once for a whole step.

Tokens of all rows lie one after the other; only attention knows which belong together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model.attention import PagedAttention
from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Cosines and sines of rotary position embedding, each [positions, 1, D / 2].

    Source: RoFormer (Su et al., 2021), section 3.4.2, with a head's halves as the pairs.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, config: LlamaConfig, like: Tensor) -> "RotaryTable":
        """Compute every position of the model's context, in dtype and on the device of `like`."""
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        frequencies = 1.0 / config.rope_theta**exponents
        positions = torch.arange(config.max_context_tokens, dtype=torch.float32)
        # Angles in float32 whatever the dtype: in bfloat16 positions above 256 aren't distinct.
        angles = torch.outer(positions, frequencies).unsqueeze(1)
        return cls(angles.cos().to(like), angles.sin().to(like))

    def at(self, positions: Tensor) -> "RotaryTable":
        """Return the rows of these positions, [T, 1, D / 2]."""
        return RotaryTable(self.cos[positions], self.sin[positions])

    def rotate(self, heads: Tensor) -> Tensor:
        """Turn heads [T, any, D] by the angles of their tokens."""
        first, second = heads.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1)


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
        heads = functional.linear(hidden, layer.qkv).view(len(hidden), -1, self.config.head_size)
        num_queries, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        rotated = turn.rotate(heads[:, : num_queries + num_kv_heads])
        return rotated[:, :num_queries], rotated[:, num_queries:], heads[:, -num_kv_heads:]


def _mlp(layer: LayerWeights, hidden: Tensor) -> Tensor:
    gate, up = functional.linear(hidden, layer.gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, layer.down)
