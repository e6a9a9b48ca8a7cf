"""The way to the CPU's kernels, which need Numba and an OpenMP library."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.layers import Layers
from tidegate_engine.model.linear import BareLinear
from tidegate_engine.model.openmp import Team
from tidegate_engine.model.rotary import RotaryTable

if TYPE_CHECKING:
    from tidegate_engine.model.cpu_copy import StreamingCopy
    from tidegate_engine.model.cpu_forward import CpuForward
    from tidegate_engine.model.cpu_kernels import KernelCompiler
    from tidegate_engine.model.cpu_product import Desks

# Numba is imported by functions: it takes a while, and need not be there.
_MIN_BLOCK = 16


class CpuBackend:
    """Makes what a model is computed with, on the CPU's kernels."""

    def __init__(self, config: LlamaConfig, team: Team, compiler: "KernelCompiler") -> None:
        self._config = config
        self._team = team
        self._compiler = compiler
        self._products: dict[tuple[int, int], int] = {}
        self._desks: Desks | None = None

    @classmethod
    def find(
        cls, config: LlamaConfig, like: Tensor, kernel_cache: Path | None
    ) -> "CpuBackend | None":
        """Return it where it can be used for weights `like` this one, and pays."""
        team = Team.find()
        is_float = like.device.type == "cpu" and like.dtype == torch.float32
        if not is_float or team is None or importlib.util.find_spec("numba") is None:
            return None
        # With fewer or shorter registers the product's sums don't stay in them.
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            return None
        from tidegate_engine.model.cpu_kernels import KernelCompiler, fits

        return cls(config, team, KernelCompiler(kernel_cache)) if fits(config) else None

    def new_linear(self, weight: Tensor) -> BareLinear:
        """Lay out a weight [outputs, inputs] in float32."""
        from tidegate_engine.model.cpu_product import Desks, PanelLinear, Panels, product_kernel

        panels = Panels(weight)
        kind = panels.num_inputs, panels.bits
        if kind not in self._products:
            self._products[kind] = self._compiler.compile(product_kernel(*kind))
        self._desks = self._desks or Desks()
        return PanelLinear(panels, self._products[kind], self._team, self._desks)

    def new_copy(self) -> "StreamingCopy":
        """Compile what copies KV blocks."""
        from tidegate_engine.model.cpu_copy import StreamingCopy, copy_bytes

        return StreamingCopy(self._compiler.compile(copy_bytes), self._compiler)

    def new_forward(
        self, layers: Layers[BareLinear], rotary: RotaryTable, block_size: int
    ) -> "CpuForward | None":
        """Compile the kernels for a block size; None = they don't fit it."""
        from tidegate_engine.model.cpu_forward import CpuForward
        from tidegate_engine.model.cpu_kernels import compile_kernels

        if block_size % _MIN_BLOCK:
            return None
        kernels = compile_kernels(
            self._config,
            self._compiler,
            block_size=block_size,
            is_int8=layers.output.scales is not None,
        )
        return CpuForward(self._config, layers, rotary, kernels=kernels, team=self._team)
