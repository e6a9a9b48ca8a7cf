"""The CPU's kernels, compiled for one model."""

import hashlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
from numba import types

from tidegate_engine.model import cpu_attention, cpu_copy, cpu_product, cpu_rows, simd
from tidegate_engine.model.config import LlamaConfig
from tidegate_engine.model.file_lock import locked

_log = logging.getLogger(__name__)

_SOURCES = (cpu_attention, cpu_copy, cpu_product, cpu_rows, simd)
_SIGNATURE = types.void(types.CPointer(types.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuKernels:
    """Addresses of C functions, 0 where a model needs none.

    Each takes the address of its arguments, 64-bit integers in the order that it documents.

    Attributes:
        shape: What the attention kernels are compiled for.
    """

    shape: cpu_attention.AttentionShape
    add_and_norm: int
    rotate: int
    attend: int
    gate: int
    quantise: int
    dequantise: int


def fits(config: LlamaConfig) -> bool:
    """Whether the kernels can be compiled for a model: they work on 16 or 32 numbers at a time."""
    halves = (config.head_size // 2, config.intermediate_size)
    whole = (config.hidden_size, config.vocab_size)
    return all(size % simd.LANES == 0 for size in halves) and all(
        size % cpu_product.PANEL == 0 for size in whole
    )


class KernelCompiler:
    """Compiles kernels, and keeps them in memory as long as it is there itself."""

    def __init__(self, cache_dir: Path | None) -> None:
        """Prepare; where that can be, what is compiled is kept there for other processes."""
        self._functions: list[object] = []
        self._directory: Path | None = None
        if cache_dir is not None:
            # Numba looks at the time of one file only, and a wheel's files have all the same.
            sources = b"".join(Path(str(module.__file__)).read_bytes() for module in _SOURCES)
            self._directory = _written(cache_dir / hashlib.sha256(sources).hexdigest()[:16])
            numba.config.CACHE_DIR = str(self._directory)
            # Not anywhere else, if it can't be there.
            numba.config.CACHE_LOCATOR_CLASSES = "UserProvidedCacheLocator"

    def compile(self, kernel: Callable[[Any], None]) -> int:
        """Return the address of a C function."""
        # Numba doesn't lock what it keeps: two that begin at once would mix up their kernels.
        lock = nullcontext() if self._directory is None else locked(self._directory / "lock")
        with lock:
            function = numba.cfunc(_SIGNATURE, cache=self._directory is not None)(kernel)
        self._functions.append(function)
        address: int = function.address
        return address


def _written(directory: Path) -> Path | None:
    """Return the directory if something can be kept there."""
    try:
        with locked(directory / "lock"):
            return directory
    except OSError as error:
        _log.warning("compiled kernels can't be kept, each start compiles anew: %s", error)
        return None


def compile_kernels(
    config: LlamaConfig, compiler: KernelCompiler, *, block_size: int, is_int8: bool
) -> CpuKernels:
    """Compile all kernels for blocks of a multiple of 16."""
    shape = cpu_attention.AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_layers=config.num_layers,
        block_size=block_size,
        is_int8=is_int8,
        has_bias=config.has_qkv_bias,
        has_qk_norm=config.has_qk_norm,
        epsilon=config.rms_norm_epsilon,
    )
    return CpuKernels(
        shape=shape,
        add_and_norm=compiler.compile(
            cpu_rows.add_and_norm_kernel(
                config.hidden_size, config.rms_norm_epsilon, is_int8=is_int8
            )
        ),
        rotate=compiler.compile(cpu_attention.rotate_kernel(shape)),
        attend=compiler.compile(cpu_attention.attend_kernel(shape)),
        gate=compiler.compile(cpu_rows.gate_kernel(config.intermediate_size, is_int8=is_int8)),
        quantise=compiler.compile(cpu_rows.quantise_kernel(config.query_size)) if is_int8 else 0,
        dequantise=compiler.compile(cpu_rows.dequantise_kernel(config.vocab_size))
        if is_int8
        else 0,
    )
