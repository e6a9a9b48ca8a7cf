"""The forward pass of the Llama family, once for a whole step.

Tokens of all rows lie one after the other; only attention knows which belong together.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from tidegate_engine.model.batch import Batch
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.cpu import CpuBackend
from tidegate_engine.model.layers import Layers, NewLinear
from tidegate_engine.model.linear import DenseLinear, Int8Linear, Quantization
from tidegate_engine.model.portable import PortableForward
from tidegate_engine.model.rotary import RotaryTable
from tidegate_engine.model.weights import LlamaWeights


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
        self._cpu = CpuBackend.find(config, weights.embedding, kernel_cache)
        new_linear: NewLinear = DenseLinear if self._cpu is None else self._cpu.new_linear
        if quantization == "int8":
            new_linear = Int8Linear
        self._layers = Layers.pack(weights, new_linear)
        self._rotary = RotaryTable.of(config, self._layers.embedding)
        self._portable = PortableForward(config, self._layers, self._rotary)
        self._by_block_size: dict[int, ForwardPass] = {}

    def forward(self, batch: Batch, pool: Tensor) -> Tensor:
        """Compute a step."""
        block_size = pool.shape[3]
        if block_size not in self._by_block_size:
            self._by_block_size[block_size] = self._choose(block_size)
        return self._by_block_size[block_size].forward(batch, pool)

    def _choose(self, block_size: int) -> ForwardPass:
        kernels = None
        if self._cpu is not None:
            kernels = self._cpu.new_forward(self._layers, self._rotary, block_size)
        return self._portable if kernels is None else kernels
