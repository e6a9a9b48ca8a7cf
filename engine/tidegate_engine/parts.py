"""From settings to a model and what executes it."""

import time
from dataclasses import dataclass

from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.simulated import SimulatedExecutor, StepCost
from tidegate_engine.model.bytes_tokenizer import NUM_PRINTABLE, BytesTokenizer
from tidegate_engine.server.served_model import ServedModel, Tokenizer
from tidegate_engine.settings import Settings

_SIMULATED_CONTEXT_TOKENS = 1 << 17


@dataclass(frozen=True, slots=True)
class Parts:
    """A model and its executor.

    Attributes:
        summary: What was loaded, for the log.
    """

    executor: Executor
    model: ServedModel
    summary: str


def load_parts(settings: Settings, *, created: int) -> Parts:
    """Load what the settings name; takes seconds with a real model.

    Args:
        settings: What to load.
        created: Seconds since the epoch, for the API.

    Raises:
        ModelLoadError: The model can't be loaded.
    """
    if settings.executor == "torch":
        return _load_torch(settings, created)
    return _load_simulated(settings, created)


def _load_torch(settings: Settings, created: int) -> Parts:
    # Imported here, as simulated engines need neither PyTorch nor the memory that it takes.
    import torch

    from tidegate_engine.executor.kv_cache import KvCache
    from tidegate_engine.executor.torch_executor import TorchExecutor
    from tidegate_engine.model.loader import load_model

    dtype: torch.dtype = getattr(torch, settings.dtype)
    loaded = load_model(settings.model_source, settings.cache_dir, dtype, settings.device)
    cache = KvCache.allocate(
        loaded.config,
        num_blocks=settings.kv_blocks,
        block_size=settings.block_size,
        dtype=dtype,
        device=settings.device,
    )
    block_bytes = KvCache.block_bytes(loaded.config, settings.block_size, dtype)
    return Parts(
        executor=TorchExecutor(loaded, cache, num_threads=settings.threads),
        model=ServedModel(
            name=settings.model_name,
            tokenizer=loaded.tokenizer,
            max_context_tokens=loaded.config.max_context_tokens,
            created=created,
        ),
        summary=(
            f"{settings.model_source} in {settings.dtype} on {settings.device},"
            f" {settings.threads} threads, KV pool of {_mib(block_bytes * settings.kv_blocks)}"
        ),
    )


def _load_simulated(settings: Settings, created: int) -> Parts:
    tokenizer: Tokenizer = BytesTokenizer()
    vocab_size, context = NUM_PRINTABLE, _SIMULATED_CONTEXT_TOKENS
    if settings.model_source:
        from tidegate_engine.model.loader import load_model

        loaded = load_model(settings.model_source, settings.cache_dir)
        tokenizer, context = loaded.tokenizer, loaded.config.max_context_tokens
        vocab_size = tokenizer.vocab_size
    executor = SimulatedExecutor(
        capacity=Capacity(
            num_blocks=settings.kv_blocks, num_host_blocks=0, block_size=settings.block_size
        ),
        vocab_size=vocab_size,
        cost=StepCost(
            step_seconds=settings.simulated_step_seconds,
            prefill_token_seconds=settings.simulated_prefill_token_seconds,
            decode_seconds=settings.simulated_decode_seconds,
        ),
        pace=time.sleep,
    )
    model = ServedModel(
        name=settings.model_name,
        tokenizer=tokenizer,
        max_context_tokens=context,
        created=created,
    )
    return Parts(executor, model, f"simulated ({settings.model_source or 'no weights'})")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
