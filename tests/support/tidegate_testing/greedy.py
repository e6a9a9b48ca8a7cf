"""Greedy text straight from the forward pass, with its logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.llama import Llama
from tidegate_testing.models import plan_row

_BLOCK_SIZE = 16


def continue_greedily(
    llama: Llama, prompts: Sequence[Sequence[int]], *, count: int, every: int = 1
) -> tuple[list[list[int]], Tensor]:
    """Continue all prompts by `count` tokens in one batch.

    Returns the tokens of each, prompt included, and the logits of every `every`-th step [S, steps,
    vocabulary].
    """
    longest = max(map(len, prompts)) + count
    blocks_each = -(-longest // _BLOCK_SIZE)
    num_blocks = blocks_each * len(prompts)
    pool = KvCache.allocate(llama.config, num_blocks=num_blocks, block_size=_BLOCK_SIZE).pool
    # Neighbours' blocks in turn, so that nobody's context lies in one piece.
    tables = [[*range(i, num_blocks, len(prompts))] for i in range(len(prompts))]
    sequences = [[*prompt] for prompt in prompts]
    starts = [0] * len(prompts)
    kept = []
    for step in range(count):
        rows = [
            plan_row(tokens[start:], table, request_id=f"{i}", start=start, is_decode=step > 0)
            for i, (tokens, table, start) in enumerate(zip(sequences, tables, starts, strict=True))
        ]
        starts = [len(tokens) for tokens in sequences]
        with torch.inference_mode():
            batch = build_batch(rows, llama.config, num_blocks=num_blocks, block_size=_BLOCK_SIZE)
            logits = llama.forward(batch, pool)
        if step % every == 0:
            kept.append(logits.clone())
        for tokens, best in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            tokens.append(best)
    return sequences, torch.stack(kept, dim=1)
