"""Rotary position embedding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig


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
        scaling = config.rope_scaling
        if scaling is not None:
            frequencies = frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
        positions = torch.arange(config.max_context_tokens, dtype=torch.float32)
        # Angles in float32 whatever the dtype: in bfloat16 positions above 256 aren't distinct.
        angles = torch.outer(positions, frequencies).unsqueeze(1)
        factor = 1.0 if scaling is None else scaling.attention_factor
        return cls((angles.cos() * factor).to(like), (angles.sin() * factor).to(like))

    def at(self, positions: Tensor) -> "RotaryTable":
        """Return the rows of these positions, [T, 1, D / 2]."""
        return RotaryTable(self.cos[positions], self.sin[positions])

    def rotate(self, heads: Tensor) -> Tensor:
        """Turn heads [T, any, D] by the angles of their tokens."""
        first, second = heads.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1)
