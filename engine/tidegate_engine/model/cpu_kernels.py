"""The CPU's kernels, compiled for one model."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from numba import types

from tidegate_engine.model import cpu_attention, cpu_rows, simd
from tidegate_engine.model.config import LlamaConfig

_SOURCES = (cpu_attention, cpu_rows, simd)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """Addresses of C functions, 0 where a model needs none.

    Each takes the address of its arguments, 64-bit integers in the order that it documents.

    Attributes:
        shape: What the attention kernels are compiled for.
        code: Keeps the functions in memory.
    """

    shape: cpu_attention.AttentionShape
    add_and_norm: int
    rotate: int
    attend: int
    gate: int
    quantise: int
    dequantise: int
    code: tuple[object, ...]


def fits(config: LlamaConfig, block_size: int) -> bool:
    """Whether the kernels can be compiled for a model: they work on 16 numbers at a time."""
    sizes = (config.head_size // 2, config.hidden_size, config.intermediate_size, block_size)
    return all(size % simd.LANES == 0 for size in (*sizes, config.vocab_size))


def compile_kernels(
    config: LlamaConfig, *, block_size: int, has_bias: bool, is_int8: bool, cache_dir: Path | None
) -> CpuKernels:
    """Compile all kernels: seconds, unless `cache_dir` has them from an earlier time."""
    if cache_dir is not None:
        # Numba looks at the time of one file only, and a wheel's files have all the same.
        sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _SOURCES)
        numba.config.CACHE_DIR = str(cache_dir / hashlib.sha256(sources).hexdigest()[:16])
    signature = types.void(types.CPointer(types.int64))

    code: list[object] = []

    def compiled(kernel: Callable[[Any], None]) -> int:
        function = numba.cfunc(signature, cache=cache_dir is not None)(kernel)
        code.append(function)
        address: int = function.address
        return address

    shape = cpu_attention.AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_layers=config.num_layers,
        block_size=block_size,
        is_int8=is_int8,
        has_bias=has_bias,
        has_qk_norm=config.has_qk_norm,
        epsilon=config.rms_norm_epsilon,
    )
    return CpuKernels(
        shape=shape,
        add_and_norm=compiled(
            cpu_rows.add_and_norm_kernel(
                config.hidden_size, config.rms_norm_epsilon, is_int8=is_int8
            )
        ),
        rotate=compiled(cpu_attention.rotate_kernel(shape)),
        attend=compiled(cpu_attention.attend_kernel(shape)),
        gate=compiled(cpu_rows.gate_kernel(config.intermediate_size, is_int8=is_int8)),
        quantise=compiled(cpu_rows.quantise_kernel(config.query_size)) if is_int8 else 0,
        dequantise=compiled(cpu_rows.dequantise_kernel(config.vocab_size)) if is_int8 else 0,
        code=tuple(code),
    )
