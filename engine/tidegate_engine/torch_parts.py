"""From settings to a real model on PyTorch: how it is computed, how much KV it gets.

Apart from `parts`, as simulated engines need neither PyTorch nor the memory that it takes.
"""

from dataclasses import dataclass

import torch

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.choosing import Trial, best_of, describe, thread_counts, try_all
from tidegate_engine.executor.kv_cache import KvCache, KvCacheError
from tidegate_engine.executor.torch_executor import TorchExecutor
from tidegate_engine.kv_sizing import DEVICE_FRACTION, KvMemory, size_kv
from tidegate_engine.machine import Machine
from tidegate_engine.model.linear import UnsupportedProductError
from tidegate_engine.model.llama import Llama
from tidegate_engine.model.loader import load_model
from tidegate_engine.server.served_model import Tokenizer
from tidegate_engine.settings import AUTO, Settings, variable_of
from tidegate_engine.start_errors import DeviceError, StartError, size_text
from tidegate_engine.summary import Summary, counted

_AUTO_DTYPES = ("float32", "bfloat16")
_KERNELS = "kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchParts:
    """A loaded model, and what executes it.

    Attributes:
        costs: Of the executor, measured.
        summary: What was loaded and chosen, for the log.
    """

    executor: TorchExecutor
    tokenizer: Tokenizer
    max_context_tokens: int
    costs: ExecutorCosts
    summary: Summary


def load_torch(settings: Settings) -> TorchParts:
    """Load the model, choose what is left to `auto`, and measure.

    Raises:
        ModelLoadError: The model can't be loaded.
        StartError: The device isn't there, or the KV blocks don't fit into memory.
    """
    _check_device(settings.device)
    cores = Machine.of_this_process().cores
    # Loading lays out weights, too; PyTorch's own choice knows nothing of quotas.
    torch.set_num_threads(_thread_counts(settings, cores)[-1])
    dtypes: list[Trial[str]] = []
    if settings.dtype == AUTO:
        dtypes = try_all(_AUTO_DTYPES, lambda dtype: _measure_dtype(settings, dtype))
    dtype = best_of(dtypes).way if dtypes else settings.dtype
    model = _load(settings, dtype)
    cache = _allocate(settings, model.llama, dtype)
    executor = TorchExecutor(model.llama, cache)
    threads = _try_threads(settings, executor, cores)
    chosen = best_of(threads)
    torch.set_num_threads(chosen.way)
    return TorchParts(
        executor=executor,
        tokenizer=model.tokenizer,
        max_context_tokens=model.llama.config.max_context_tokens,
        costs=chosen.costs,
        summary=(
            ("model", f"{settings.model_source}, {_shape(model)}"),
            (
                "computing",
                _computing(
                    settings,
                    dtype,
                    has_kernels=executor.has_kernels,
                    dtypes=dtypes,
                    threads=threads,
                ),
            ),
            ("memory", _memory(model.llama, cache)),
        ),
    )


def _check_device(name: str) -> None:
    device = torch.device(name)
    if device.type == "cpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise DeviceError(
            variable_of("device"), f"{name} isn't there: PyTorch finds {count} CUDA devices"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model that can compute, and what else came with it."""

    llama: Llama
    tokenizer: Tokenizer
    num_parameters: int


def _load(settings: Settings, dtype: str) -> _Model:
    """Load a model and lay it out; of what was loaded, only what it uses is still there then."""
    loaded = load_model(settings.model_source, settings.cache_dir, _dtype(dtype), settings.device)
    try:
        llama = Llama(
            loaded.config,
            loaded.weights,
            quantization=settings.quantization,
            kernel_cache=settings.cache_dir / _KERNELS,
        )
    except UnsupportedProductError as error:
        raise StartError(variable_of("quantization"), str(error)) from error
    return _Model(
        llama=llama, tokenizer=loaded.tokenizer, num_parameters=loaded.weights.num_parameters
    )


# -- what is measured ------------------------------------------------------------------------------


def _measure_dtype(settings: Settings, dtype: str) -> ExecutorCosts:
    """Measure a number format with a model that is dropped afterwards."""
    llama = _load(settings, dtype).llama
    cache = KvCache.allocate(
        llama.config,
        num_blocks=1,
        block_size=settings.block_size,
        dtype=_dtype(dtype),
        device=settings.device,
    )
    return TorchExecutor(llama, cache).measure()


def _try_threads(settings: Settings, executor: TorchExecutor, cores: int) -> list[Trial[int]]:
    def measure(count: int) -> ExecutorCosts:
        torch.set_num_threads(count)
        return executor.measure()

    # The most first: kernels are laid out for as many threads as there are when they first run.
    return try_all(_thread_counts(settings, cores)[::-1], measure)[::-1]


def _thread_counts(settings: Settings, cores: int) -> list[int]:
    if settings.threads is not None:
        return [settings.threads]
    # The device computes; what is left for the CPU is too little to be divided.
    return thread_counts(cores) if settings.device == "cpu" else [1]


# -- KV memory -------------------------------------------------------------------------------------


def _allocate(settings: Settings, llama: Llama, dtype: str) -> KvCache:
    """Reserve KV memory beside a model whose weights are in memory as they stay there."""
    config = llama.config
    block_bytes = KvCache.block_bytes(config, settings.block_size, _dtype(dtype))
    blocks_a_request = -(-config.max_context_tokens // settings.block_size)
    blocks = size_kv(
        _kv_memory(settings.device, block_bytes, llama.weight_bytes),
        num_blocks=settings.kv_blocks,
        num_host_blocks=settings.host_kv_blocks,
        most_blocks=settings.max_num_seqs * blocks_a_request,
    )
    try:
        return KvCache.allocate(
            config,
            num_blocks=blocks.pool,
            block_size=settings.block_size,
            num_host_blocks=blocks.host,
            dtype=_dtype(dtype),
            device=settings.device,
        )
    except KvCacheError as error:
        field = "host_kv_blocks" if error.parameter == "num_host_blocks" else "kv_blocks"
        raise StartError(variable_of(field), str(error)) from error


def _kv_memory(device: str, block_bytes: int, weight_bytes: int) -> KvMemory:
    machine = Machine.of_this_process()
    if device == "cpu":
        return KvMemory(
            block_bytes=block_bytes,
            device_bytes=None,
            host_bytes=max(0, machine.memory_bytes - weight_bytes),
            available_host_bytes=machine.available_bytes,
        )
    # What loading and quantising have needed is kept by PyTorch, and would count as taken.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return KvMemory(
        block_bytes=block_bytes,
        device_bytes=max(0, free - int((1.0 - DEVICE_FRACTION) * total)),
        host_bytes=machine.memory_bytes,
        available_host_bytes=machine.available_bytes,
    )


# -- the summary -----------------------------------------------------------------------------------


def _shape(model: _Model) -> str:
    config = model.llama.config
    return (
        f"{model.num_parameters / 1e6:.0f} M parameters:"
        f" {config.num_layers} layers of {config.hidden_size},"
        f" {config.num_heads} heads over {config.num_kv_heads} of {config.head_size},"
        f" vocabulary {config.vocab_size}, context {config.max_context_tokens}"
    )


def _computing(
    settings: Settings,
    dtype: str,
    *,
    has_kernels: bool,
    dtypes: list[Trial[str]],
    threads: list[Trial[int]],
) -> str:
    text = f"{dtype}, quantization {settings.quantization}, {settings.device}"
    text += f", {'own kernels' if has_kernels else 'PyTorch'}"
    text += f", {counted(best_of(threads).way, 'thread')}"
    reasons = []
    if dtypes:
        reasons.append(describe(dtypes, str))
    if len(threads) > 1:
        reasons.append(describe(threads, lambda count: counted(count, "thread")))
    if reasons:
        text += f" (a typical step: {'; '.join(reasons)})"
    return text


def _memory(llama: Llama, cache: KvCache) -> str:
    pool, host_pool = size_text(cache.pool.nbytes), size_text(cache.host_pool.nbytes)
    return (
        f"weights {size_text(llama.weight_bytes)};"
        f" {cache.num_blocks} KV blocks of {cache.block_size} tokens, {pool};"
        f" {cache.num_host_blocks} in host memory, {host_pool}"
    )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
