"""How long a model's steps and copies take on this machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tidegate_engine.core.costs import ExecutorCosts
from tidegate_engine.core.plan import PlanRow, SampledToken, SwapCopy
from tidegate_engine.core.sampling import SamplingContext, SamplingParams
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.kv_copies import KvCopies
from tidegate_engine.model.config import LlamaConfig

Compute = Callable[[Sequence[PlanRow], KvCache], Mapping[str, SampledToken]]
"""Computes a step's rows in a KV cache; returns when it is done."""

_REPEATS = 2
# Matrix products of one row and of many run different kernels: the line is drawn through batch
# sizes at which engines work, and overestimates the smallest.
_FEW_DECODES = 8
_MANY_DECODES = 32
_CONTEXT_TOKENS = 256
_CHUNK_TOKENS = 64
_NUM_SWAP_BLOCKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepSeconds:
    """Measured steps; those `in_context` have so many tokens before each row."""

    few_decodes: float
    many_decodes: float
    few_decodes_in_context: float
    chunk: float
    chunk_in_context: float


def measure_costs(
    compute: Compute,
    config: LlamaConfig,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExecutorCosts:
    """Time a few steps and copies, in KV memory that is taken for it and given back.

    Each is repeated, and the fastest counts: what disturbs can only add. The model's costs are
    differences between steps that differ in one respect; one that noise makes negative is 0.
    """
    context = min(_CONTEXT_TOKENS, config.max_context_tokens // 2)
    chunk = min(_CHUNK_TOKENS, config.max_context_tokens // 2)
    blocks_in_context = _FEW_DECODES * _blocks_for(context + 1, block_size)
    cache = KvCache.allocate(
        config,
        num_blocks=max(blocks_in_context, _blocks_for(context + chunk, block_size), _MANY_DECODES),
        num_host_blocks=_NUM_SWAP_BLOCKS,
        block_size=block_size,
        dtype=dtype,
        device=device,
    )

    def step(num_rows: int, start: int, tokens: int) -> float:
        num_blocks = _blocks_for(start + tokens, block_size)
        rows = [_row(i, start, tokens, num_blocks) for i in range(num_rows)]
        return _fastest(lambda: compute(rows, cache))

    seconds = _StepSeconds(
        few_decodes=step(_FEW_DECODES, 0, 1),
        many_decodes=step(_MANY_DECODES, 0, 1),
        few_decodes_in_context=step(_FEW_DECODES, context, 1),
        chunk=step(1, 0, chunk),
        chunk_in_context=step(1, context, chunk),
    )
    return _costs(seconds, context, chunk, _swap_block_seconds(cache))


def _costs(
    seconds: _StepSeconds, context: int, chunk: int, swap_block_seconds: float
) -> ExecutorCosts:
    more_decodes = seconds.many_decodes - seconds.few_decodes
    decode = max(0.0, more_decodes) / (_MANY_DECODES - _FEW_DECODES)
    step = max(0.0, seconds.few_decodes - _FEW_DECODES * decode)
    read = max(0.0, seconds.few_decodes_in_context - seconds.few_decodes)
    pair = max(0.0, seconds.chunk_in_context - seconds.chunk) / (chunk * context)
    own_pairs = chunk * (chunk - 1) / 2
    return ExecutorCosts(
        step_seconds=step,
        prefill_token_seconds=max(0.0, seconds.chunk - step - pair * own_pairs) / chunk,
        decode_seconds=decode,
        context_token_seconds=read / (_FEW_DECODES * context),
        prefill_pair_seconds=pair,
        swap_block_seconds=swap_block_seconds,
    )


def _swap_block_seconds(cache: KvCache) -> float:
    """Return the time of a block, one way: the mean of both."""
    copies = KvCopies(cache)
    blocks = tuple(range(_NUM_SWAP_BLOCKS))
    swap = SwapCopy(0, "", device_blocks=blocks, host_blocks=blocks)

    def there_and_back() -> None:
        copies.swap_out(swap)
        copies.pass_fences(must_wait=True)
        copies.swap_in(swap)
        copies.pass_fences(must_wait=True)

    return _fastest(there_and_back) / (2 * _NUM_SWAP_BLOCKS)


def _row(i: int, start: int, tokens: int, num_blocks: int) -> PlanRow:
    return PlanRow(
        request_id=str(i),
        start=start,
        token_ids=[0] * tokens,
        block_ids=range(i * num_blocks, (i + 1) * num_blocks),
        samples=True,
        sampling=SamplingContext(
            params=SamplingParams(temperature=0.0),
            token_ids=[0] * (start + tokens),
            num_prompt_tokens=start + tokens,
        ),
    )


def _blocks_for(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _fastest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
