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
from tidegate_engine.model.openmp import shorten_spinning
from tidegate_engine.server.served_model import ServedModel, Tokenizer
from tidegate_engine.settings import Settings
from tidegate_engine.summary import Summary

_SIMULATED_CONTEXT_TOKENS = 1 << 17
_SIMULATED_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class Parts:
    """A model and its executor.

    Attributes:
        costs: Of the executor, measured or known.
        summary: What was loaded, for the log.
    """

    executor: Executor
    model: ServedModel
    costs: ExecutorCosts
    summary: Summary


def load_parts(settings: Settings, *, created: int) -> Parts:
    """Load what the settings name, and measure it; takes seconds with a real model.

    Args:
        settings: What to load.
        created: Seconds since the epoch, for the API.

    Raises:
        ModelLoadError: The model can't be loaded.
        StartError: This machine lacks what the settings ask for.
    """
    if settings.executor == "torch":
        return _load_torch(settings, created)
    return _load_simulated(settings, created)


def _load_torch(settings: Settings, created: int) -> Parts:
    shorten_spinning()
    # Imported here, as simulated engines need neither PyTorch nor the memory that it takes.
    from tidegate_engine.torch_parts import load_torch

    loaded = load_torch(settings)
    return Parts(
        executor=loaded.executor,
        model=ServedModel(
            name=settings.model_name,
            tokenizer=loaded.tokenizer,
            max_context_tokens=loaded.max_context_tokens,
            created=created,
        ),
        costs=loaded.costs,
        summary=loaded.summary,
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
    text = f"simulated, tokens of {settings.model_source or 'bytes'}"
    if settings.simulated_gpu:
        text += f", as fast as {settings.simulated_model} on {settings.simulated_gpu}"
    capacity = executor.capacity
    blocks = (
        f"{capacity.num_blocks} KV blocks of {capacity.block_size} tokens,"
        f" {capacity.num_host_blocks} in host memory"
    )
    return Parts(executor, model, executor.measure(), (("model", text), ("memory", blocks)))


def _simulated_capacity(settings: Settings) -> Capacity:
    num_blocks = settings.kv_blocks or _SIMULATED_BLOCKS
    if settings.simulated_gpu and settings.kv_blocks is None:
        gpu, model = GPUS[settings.simulated_gpu], MODELS[settings.simulated_model]
        try:
            fitting = fitting_capacity(gpu, model, block_size=settings.block_size)
        except ModelTooLargeError as error:
            raise ModelLoadError(settings.simulated_model, str(error)) from error
        num_blocks = fitting.num_blocks
    num_host_blocks = settings.host_kv_blocks
    return Capacity(
        num_blocks=num_blocks,
        num_host_blocks=num_blocks // 2 if num_host_blocks is None else num_host_blocks,
        block_size=settings.block_size,
        block_bytes=MODELS[settings.simulated_model].kv_token_bytes * settings.block_size,
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
