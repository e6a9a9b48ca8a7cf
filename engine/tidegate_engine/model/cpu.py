"""The way to the CPU's kernels, which need Numba and an OpenMP library."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.layers import Layers
from tidegate_engine.model.openmp import Team
from tidegate_engine.model.rotary import RotaryTable

if TYPE_CHECKING:
    from tidegate_engine.model.cpu_forward import CpuForward


def new_forward(
    config: LlamaConfig,
    layers: Layers,
    rotary: RotaryTable,
    *,
    block_size: int,
    kernel_cache: Path | None,
) -> "CpuForward | None":
    """Compile a model's kernels; None = they aren't for this machine or for these sizes."""
    team = Team.find()
    if team is None or importlib.util.find_spec("numba") is None:
        return None
    # Only now, since Numba takes a while, and need not be there.
    from tidegate_engine.model.cpu_forward import CpuForward
    from tidegate_engine.model.cpu_kernels import compile_kernels, fits

    if not fits(config, block_size):
        return None
    kernels = compile_kernels(
        config,
        block_size=block_size,
        has_bias=config.has_qkv_bias,
        is_int8=layers.output.scales is not None,
        cache_dir=kernel_cache,
    )
    return CpuForward(config, layers, rotary, kernels=kernels, team=team)
