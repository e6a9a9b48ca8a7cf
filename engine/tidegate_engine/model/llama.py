"""The forward pass of the Llama family, once for a whole step.

Tokens of all rows lie one after the other; only attention knows which belong together.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cpu import CpuBackend
from tidegate_engine.model.layers import Layers
from tidegate_engine.model.linear import DenseLinear, Int8Linear, Quantization
from tidegate_engine.model.portable import PortableForward
from tidegate_engine.model.rotary import RotaryTable
from tidegate_engine.model.weights import LlamaWeights

CopyBlocks = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint8]], None]
"""Copies bytes to an array of the same size, without holding a lock."""


class ForwardPass(Protocol):
    """How a step is computed."""

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step; its keys and values are written into `pool` [N, L, 2, B, K, D].

        Returns:
            Logits of the rows that sample [rows, vocabulary]; of the others none are computed.
        """
        ...


class Llama:
    """A model of the Llama family, ready to compute steps; a `ForwardPass`.

    On a CPU in float32 the steps are computed by kernels of our own, where those can be compiled;
    what a row gets then doesn't depend on its neighbours or on how its prompt was cut in chunks,
    down to the last bit. Everywhere else, and on sizes that the kernels don't fit, they are
    computed by PyTorch's operations.

    Attributes:
        config: The model's shape.
        weight_bytes: Memory that the weights take as they are laid out.
        copy_blocks: What copies KV blocks best in a CPU's memory.
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: LlamaWeights,
        *,
        quantization: Quantization = "none",
        kernel_cache: Path | None = None,
    ) -> None:
        """Lay the weights out.

        Args:
            config: The model's shape.
            weights: Not needed any more afterwards, but for matrices that stay as they are.
            quantization: Of all matrices but the embedding.
            kernel_cache: Where compiled kernels are kept between processes; None = nowhere.
        """
        self.config = config
        cpu = CpuBackend.find(config, weights.embedding, kernel_cache)
        is_int8 = quantization == "int8"
        self._new_kernels: Callable[[int], ForwardPass | None] = _no_kernels
        self.copy_blocks: CopyBlocks = np.copyto if cpu is None else cpu.new_copy()
        if cpu is None:
            layers = Layers.pack(weights, Int8Linear if is_int8 else DenseLinear)
            rotary = RotaryTable.of(config, layers.embedding)
        else:
            bare = Layers.pack(weights, Int8Linear if is_int8 else cpu.new_linear)
            layers, rotary = bare, RotaryTable.of(config, bare.embedding)
            self._new_kernels = partial(cpu.new_forward, bare, rotary)
        self.weight_bytes = layers.num_bytes
        self._portable = PortableForward(config, layers, rotary)
        self._by_block_size: dict[int, ForwardPass] = {}

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step."""
        return self._for_blocks(pool.shape[3]).forward(batch, pool)

    def has_kernels(self, block_size: int) -> bool:
        """Whether steps with blocks of this size are computed by kernels of our own."""
        return self._for_blocks(block_size) is not self._portable

    def _for_blocks(self, block_size: int) -> ForwardPass:
        if block_size not in self._by_block_size:
            kernels = self._new_kernels(block_size)
            self._by_block_size[block_size] = self._portable if kernels is None else kernels
        return self._by_block_size[block_size]


def _no_kernels(_block_size: int) -> None:
    """What machines without kernels have for any block size."""
