"""The memory of the paged KV pool."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig


class KvCacheError(ValueError):
    """A KV pool can't be of this size.

    Attributes:
        parameter: The argument at fault.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter} {problem}")
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of all sequences, in blocks that a block table strings together.

    Which block belongs to whom is the scheduler's business: nothing here counts references.

    Attributes:
        pool: [N, L, 2, B, K, D], keys at 0 and values at 1 of the third dimension; `pool[n]` is
            contiguous, so that a block is moved in one copy. `model.attention` says why in this
            order.
    """

    pool: Tensor

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KvCache":
        """Reserve the pool. On a CPU the system hands out its pages as blocks are first used.

        Raises:
            KvCacheError: A size isn't above 0.
        """
        for parameter, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise KvCacheError(parameter, f"must be at least 1, got {value}")
        num_bytes = num_blocks * cls.block_bytes(config, block_size, dtype)
        # Zeros, since what lies behind the last token of a block is read, and masked: but garbage
        # may be NaN, which no mask hides. NumPy's come from the system, which clears a page when
        # it is first touched; PyTorch's CPU allocator would touch all of them now.
        if torch.device(device).type == "cpu":
            memory = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        else:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        shape = _block_shape(config, block_size)
        return cls(memory.view(dtype).view(num_blocks, *shape))

    @staticmethod
    def block_bytes(config: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        elements = 1
        for size in _block_shape(config, block_size):
            elements *= size
        return elements * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.shape[3]


def _block_shape(config: LlamaConfig, block_size: int) -> tuple[int, ...]:
    return (config.num_layers, 2, block_size, config.num_kv_heads, config.head_size)
