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
        pool: [N + 1, L, 2, B, K, D], keys at 0 and values at 1 of the third dimension; `pool[n]` is
            contiguous, so that a block is moved in one copy. `model.attention` says why in this
            order. The last block is scratch, where padding rows write.
        host_pool: The same in host memory, without scratch [N', L, 2, B, K, D]; pinned where the
            pool is on CUDA, as asynchronous copies need.
    """

    pool: Tensor
    host_pool: Tensor

    @classmethod
    def allocate(
        cls,
        config: LlamaConfig,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "KvCache":
        """Reserve both pools. On a CPU the system hands out their pages as blocks are first used.

        Raises:
            KvCacheError: A size isn't above 0, that of the host's pool is below 0, or there is no
                memory for one.
        """
        for parameter, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise KvCacheError(parameter, f"must be at least 1, got {value}")
        if num_host_blocks < 0:
            raise KvCacheError("num_host_blocks", f"must be at least 0, got {num_host_blocks}")
        is_cuda = torch.device(device).type == "cuda"
        shape = _block_shape(config, block_size)
        block_bytes = cls.block_bytes(config, block_size, dtype)
        pool = _zeros("num_blocks", (num_blocks + 1) * block_bytes, device)
        host_pool = _zeros(
            "num_host_blocks", num_host_blocks * block_bytes, "cpu", is_pinned=is_cuda
        )
        return cls(
            pool.view(dtype).view(num_blocks + 1, *shape),
            host_pool.view(dtype).view(num_host_blocks, *shape),
        )

    @staticmethod
    def block_bytes(config: LlamaConfig, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block over all layers."""
        elements = 1
        for size in _block_shape(config, block_size):
            elements *= size
        return elements * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool that rows may use: all but the scratch block."""
        return self.pool.shape[0] - 1

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host's pool."""
        return self.host_pool.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.pool.shape[3]


def _block_shape(config: LlamaConfig, block_size: int) -> tuple[int, ...]:
    return (config.num_layers, 2, block_size, config.num_kv_heads, config.head_size)


def _zeros(
    parameter: str, num_bytes: int, device: torch.device | str, *, is_pinned: bool = False
) -> Tensor:
    # Zeros, since what lies behind the last token of a block is read, and masked: but garbage may
    # be NaN, which no mask hides. NumPy's come from the system, which clears a page when it is
    # first touched; PyTorch's CPU allocator would touch all of them now.
    try:
        if num_bytes and torch.device(device).type == "cpu" and not is_pinned:
            return torch.from_numpy(np.zeros(num_bytes, np.uint8))
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=is_pinned)
    except (MemoryError, RuntimeError) as error:
        raise KvCacheError(parameter, f"asks for {num_bytes} bytes: {error}") from error
