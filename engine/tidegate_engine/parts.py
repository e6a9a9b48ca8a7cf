"""From settings to a model and what executes it."""

from dataclasses import dataclass

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.executor.base import Capacity, Executor
from tidegate_engine.executor.clock import WallClock
from tidegate_engine.executor.hardware import GPUS, MODELS, ModelTooLargeError, fitting_capacity
from tidegate_engine.executor.simulated import SimulatedExecutor
from tidegate_engine.executor.step_cost import AffineCost, Roofline, StepCost
from tidegate_engine.model.bytes_tokenizer import NUM_PRINTABLE, BytesTokenizer
from tidegate_engine.model.errors import ModelLoadError
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
        num_host_blocks=_num_host_blocks(settings, settings.kv_blocks),
        dtype=dtype,
        device=settings.device,
    )
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
            f" {settings.threads} threads, KV pool of {_mib(cache.pool.nbytes)},"
            f" {_mib(cache.host_pool.nbytes)} on the host"
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
        capacity=_simulated_capacity(settings),
        vocab_size=vocab_size,
        cost=_simulated_cost(settings),
        clock=WallClock(),
    )
    model = ServedModel(
        name=settings.model_name,
        tokenizer=tokenizer,
        max_context_tokens=context,
        created=created,
    )
    summary = f"simulated ({settings.model_source or 'no weights'})"
    if settings.simulated_gpu:
        summary += f" as {settings.simulated_model} on {settings.simulated_gpu}"
    return Parts(executor, model, summary)


def _simulated_capacity(settings: Settings) -> Capacity:
    num_blocks = settings.kv_blocks
    if settings.simulated_gpu and "kv_blocks" not in settings.model_fields_set:
        gpu, model = GPUS[settings.simulated_gpu], MODELS[settings.simulated_model]
        try:
            fitting = fitting_capacity(gpu, model, block_size=settings.block_size)
        except ModelTooLargeError as error:
            raise ModelLoadError(settings.simulated_model, str(error)) from error
        num_blocks = fitting.num_blocks
    return Capacity(
        num_blocks=num_blocks,
        num_host_blocks=_num_host_blocks(settings, num_blocks),
        block_size=settings.block_size,
    )


def _simulated_cost(settings: Settings) -> StepCost:
    if settings.simulated_gpu:
        return Roofline(
            gpu=GPUS[settings.simulated_gpu],
            model=MODELS[settings.simulated_model],
            block_size=settings.block_size,
        )
    return AffineCost(
        ExecutorCosts(
            step_seconds=settings.simulated_step_seconds,
            prefill_token_seconds=settings.simulated_prefill_token_seconds,
            decode_seconds=settings.simulated_decode_seconds,
        )
    )


def _num_host_blocks(settings: Settings, num_blocks: int) -> int:
    given = settings.host_kv_blocks
    return num_blocks // 2 if given is None else given


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.0f} MiB"
