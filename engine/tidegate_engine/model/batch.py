"""One step's rows as tensors, laid out so that no later stage loops over sequences."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.config import LlamaConfig

# Contexts up to this many blocks are attended together however much their lengths differ: below
# it a kernel call costs more than the padding.
_MIN_GROUP_BLOCKS = 8

_Ints = npt.NDArray[np.int64]


class BatchError(ValueError):
    """A row can't be computed.

    Attributes:
        request_id: Whose row it is.
    """

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"row of request {request_id}: {problem}")
        self.request_id = request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGroup:
    """Rows of similar lengths, attended in one kernel call.

    S rows, each padded to Q queries (the most new tokens of a row) and M blocks (the longest
    block table); C = M * B context positions.

    Attributes:
        tokens: Index of each query among the step's tokens [S * Q]; padding repeats the row's last.
        block_tables: [S, M]; padding repeats the row's last block.
        mask: Added to the scores [S, 1, G * Q, C], once for each of the G = H / K query heads that
            share a KV head: 0 where a query may look, else minus infinity.
    """

    tokens: Tensor
    block_tables: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the forward pass needs to know of a step of T tokens.

    Attributes:
        token_ids: [T], row after row.
        positions: Of each token in its sequence [T].
        blocks: KV block that each token's key and value are written to [T].
        offsets: And its place in that block [T].
        groups: Every row is in exactly one.
        restore: Where each token's attention output lies in the groups' outputs, one group's
            padded queries after the other's [T].
        sampled: Index among the tokens of the last token of each row that samples, in row order.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    groups: tuple[AttentionGroup, ...]
    restore: Tensor
    sampled: Tensor


def build_batch(
    rows: Sequence[PlanRow],
    config: LlamaConfig,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Batch:
    """Lay out a step's rows.

    `num_blocks` is the number of blocks that block tables may point at; the pool has one more,
    behind them, that padding rows are written to. `dtype`, the masks', must be that of the model.

    Raises:
        BatchError: A row is empty, too long, misses blocks, or has a token or block that there
            isn't.
    """
    rows = [_parked(row, num_blocks, block_size) if row.is_padding else row for row in rows]
    for row in rows:
        _check(row, config, num_blocks, block_size)

    def to_device(values: _Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    firsts = np.cumsum(lengths) - lengths
    positions = np.concatenate([np.arange(row.start, row.end, dtype=np.int64) for row in rows])
    blocks = np.concatenate(
        [
            np.asarray(row.block_ids, np.int64)[np.arange(row.start, row.end) // block_size]
            for row in rows
        ]
    )
    restore = np.empty(len(positions), np.int64)
    groups = []
    num_queries = 0
    for members in _similar(rows, block_size):
        width = int(lengths[members].max())
        steps = np.arange(width)
        tokens = firsts[members, None] + np.minimum(steps, lengths[members, None] - 1)
        is_real = steps < lengths[members, None]
        restore[tokens[is_real]] = num_queries + np.flatnonzero(is_real)
        num_queries += tokens.size
        tables = _block_tables([rows[i] for i in members], block_size)
        context = torch.arange(tables.shape[1] * block_size, device=device)
        hidden = context > to_device(positions[tokens])[:, None, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -np.inf)
        mask = mask.repeat(1, 1, config.num_heads // config.num_kv_heads, 1)
        groups.append(
            AttentionGroup(
                tokens=to_device(tokens.reshape(-1)), block_tables=to_device(tables), mask=mask
            )
        )
    return Batch(
        token_ids=to_device(np.concatenate([np.asarray(r.token_ids, np.int64) for r in rows])),
        positions=to_device(positions),
        blocks=to_device(blocks),
        offsets=to_device(positions % block_size),
        groups=tuple(groups),
        restore=to_device(restore),
        sampled=to_device((firsts + lengths - 1)[[row.samples for row in rows]]),
    )


def _parked(row: PlanRow, scratch_block: int, block_size: int) -> PlanRow:
    """Point a padding row at the scratch block alone: it costs as much, and reaches nothing."""
    return row._replace(block_ids=[scratch_block] * -(-row.end // block_size))


def _check(row: PlanRow, config: LlamaConfig, num_blocks: int, block_size: int) -> None:
    if not row.token_ids or row.start < 0:
        raise BatchError(row.request_id, f"{len(row.token_ids)} tokens from {row.start}")
    if row.end > config.max_context_tokens:
        limit = f"the model's context is {config.max_context_tokens}"
        raise BatchError(row.request_id, f"needs {row.end} positions, {limit}")
    needed = -(-row.end // block_size)
    if len(row.block_ids) < needed:
        problem = f"needs {needed} blocks, its block table has {len(row.block_ids)}"
        raise BatchError(row.request_id, problem)
    if not row.is_padding and (min(row.block_ids) < 0 or max(row.block_ids) >= num_blocks):
        raise BatchError(row.request_id, f"block ids must lie in [0, {num_blocks})")
    if min(row.token_ids) < 0 or max(row.token_ids) >= config.vocab_size:
        raise BatchError(row.request_id, f"token ids must lie in [0, {config.vocab_size})")


def _similar(rows: Sequence[PlanRow], block_size: int) -> list[list[int]]:
    """Group rows so that padding at most doubles their queries and contexts.

    Lengths are long-tailed: padding a whole batch to its longest row would cost many times the
    work, and a kernel call per row is what batching is to avoid.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        num_blocks = max(-(-row.end // block_size), _MIN_GROUP_BLOCKS)
        key = ((len(row.token_ids) - 1).bit_length(), (num_blocks - 1).bit_length())
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _block_tables(rows: Sequence[PlanRow], block_size: int) -> _Ints:
    used = [-(-row.end // block_size) for row in rows]
    width = max(used)
    tables = np.empty((len(rows), width), np.int64)
    for i, row in enumerate(rows):
        tables[i, : used[i]] = row.block_ids[: used[i]]
        tables[i, used[i] :] = row.block_ids[used[i] - 1]
    return tables
