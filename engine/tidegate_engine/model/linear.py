"""Matrix products with weights that are laid out once: in the model's dtype, or in 8 bits."""

from functools import cache
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

Quantization = Literal["none", "int8"]
"""Of the weights. `int8` has one scale for each output, and quantises inputs token by token."""

_MAX_BYTE = 127.0
# What CUDA's 8-bit product asks for: more rows than 16, in multiples of 8.
_CUDA_ROWS = 32


class Linear(Protocol):
    """A product with one weight matrix, without bias."""

    @property
    def num_outputs(self) -> int:
        """Columns of the product."""
        ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What it keeps in memory."""
        ...

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product [T, outputs] of rows [T, inputs], both in the model's dtype."""
        ...


class BareLinear(Linear, Protocol):
    """One that the CPU's kernels can use."""

    @property
    def scales(self) -> Tensor | None:
        """Of each output [outputs] in float32, where `multiply_into` works in 8 bits."""
        ...

    def multiply_into(self, out: Tensor, rows: Tensor) -> None:
        """Compute the bare product: of 8-bit rows, as 32-bit sums, where there are scales.

        A row's product is the same to the last bit whatever the other rows are.
        """
        ...


class DenseLinear:
    """In the weight's own dtype."""

    def __init__(self, weight: Tensor) -> None:
        """Keep a weight [outputs, inputs]."""
        self.num_outputs = len(weight)
        self._weight = weight.t()
        self.tensors = (self._weight,)

    def multiply(self, rows: Tensor) -> Tensor:
        """Return the product."""
        return torch.mm(rows, self._weight)


class UnsupportedProductError(ValueError):
    """The processor can't multiply as the weights' quantisation needs."""


class Int8Linear:
    """In 8 bits, each output's weights with a scale of their own."""

    def __init__(self, weight: Tensor) -> None:
        """Quantise a weight [outputs, inputs], which isn't needed any more.

        Raises:
            UnsupportedProductError: Sums of 8-bit products are wrong on this device.
        """
        if not is_exact_in_8_bits(weight.device):
            raise UnsupportedProductError(
                f"8-bit products saturate on {weight.device}: a CPU has to know VNNI"
            )
        self.num_outputs = len(weight)
        values, self.scales = quantise(weight)
        self._weight = values.t()
        self.tensors = (self._weight, self.scales)

    def multiply(self, rows: Tensor) -> Tensor:
        """Quantise the rows, and return the product as if they never had been."""
        values, row_scales = quantise(rows)
        missing = -len(values) % _CUDA_ROWS if values.device.type == "cuda" else 0
        padded = functional.pad(values, (0, 0, 0, missing))
        sums = torch._int_mm(padded, self._weight)  # noqa: SLF001 - the only one PyTorch has
        scaled = sums[: len(rows)].float() * row_scales[:, None] * self.scales
        return scaled.to(rows.dtype)

    def multiply_into(self, out: Tensor, rows: Tensor) -> None:
        """Compute the sums of 8-bit rows in `out`."""
        torch._int_mm(rows, self._weight, out=out)  # noqa: SLF001


@cache
def is_exact_in_8_bits(device: torch.device) -> bool:
    """Tell whether sums of the largest 8-bit products are right: older CPUs add up in 16 bits."""
    largest = torch.full((_CUDA_ROWS, 64), 127, dtype=torch.int8, device=device)
    sums = torch._int_mm(largest, largest.t())  # noqa: SLF001
    return bool((sums == 64 * 127 * 127).all())


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row [T, any] to 8 bits, such that its largest number becomes 127 or -127.

    Returns:
        The bytes, and what to multiply each row with [T], float32.
    """
    largest = rows.abs().amax(dim=-1).float()
    factors = torch.where(largest > 0, _MAX_BYTE / largest, 0.0)
    return (rows.float() * factors[:, None]).round().to(torch.int8), largest / _MAX_BYTE
