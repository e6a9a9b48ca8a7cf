"""One step's rows as tensors, laid out so that no later stage loops over sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.config import LlamaConfig

Ints = npt.NDArray[np.int64]


class BatchError(ValueError):
    """A row can't be computed.

    Attributes:
        request_id: Whose row it is.
    """

    def __init__(self, request_id: str, problem: str) -> None:
        super().__init__(f"row of request {request_id}: {problem}")
        self.request_id = request_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """A step's S rows, in host memory.

    Attributes:
        firsts: Index of each row's first token among the step's [S].
        lengths: Number of its tokens [S].
        starts: Position of its first token in its sequence [S].
        block_tables: As many blocks as the longest context takes [S, M]; behind its end a row
            repeats its last block.
    """

    firsts: Ints
    lengths: Ints
    starts: Ints
    block_tables: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the forward pass needs to know of a step of T tokens.

    Attributes:
        token_ids: [T], row after row.
        positions: Of each token in its sequence [T].
        blocks: KV block that each token's key and value are written to [T].
        offsets: And its place in that block [T].
        sampled: Index among the tokens of the last token of each row that samples, in row order.
        rows: Which tokens belong together.
    """

    token_ids: Tensor
    positions: Tensor
    blocks: Tensor
    offsets: Tensor
    sampled: Tensor
    rows: RowTable


def build_batch(
    rows: Sequence[PlanRow],
    config: LlamaConfig,
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device | str = "cpu",
) -> Batch:
    """Lay out a step's rows.

    `num_blocks` is the number of blocks that block tables may point at; the pool has one more,
    behind them, that padding rows are written to.

    Raises:
        BatchError: A row is empty, too long, misses blocks, or has a token or block that there
            isn't.
    """
    lengths = np.array([len(row.token_ids) for row in rows], np.int64)
    starts = np.array([row.start for row in rows], np.int64)
    _check_lengths(rows, lengths, starts, config)
    token_ids = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64)
    tables = _block_tables(rows, starts + lengths, num_blocks, block_size)
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    firsts = np.cumsum(lengths) - lengths
    positions = np.arange(len(token_ids)) - firsts[row_of_token] + starts[row_of_token]
    _check_ids(rows, row_of_token, token_ids, config)
    samples = np.array([row.samples for row in rows], bool)

    def to_device(values: Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        token_ids=to_device(token_ids),
        positions=to_device(positions),
        blocks=to_device(tables[row_of_token, positions // block_size]),
        offsets=to_device(positions % block_size),
        sampled=to_device((firsts + lengths - 1)[samples]),
        rows=RowTable(firsts=firsts, lengths=lengths, starts=starts, block_tables=tables),
    )


def _check_lengths(
    rows: Sequence[PlanRow], lengths: Ints, starts: Ints, config: LlamaConfig
) -> None:
    for i in np.flatnonzero((lengths == 0) | (starts < 0)).tolist():
        raise BatchError(rows[i].request_id, f"{lengths[i]} tokens from {starts[i]}")
    for i in np.flatnonzero(starts + lengths > config.max_context_tokens).tolist():
        limit = f"the model's context is {config.max_context_tokens}"
        raise BatchError(rows[i].request_id, f"needs {rows[i].end} positions, {limit}")


def _check_ids(
    rows: Sequence[PlanRow], row_of_token: Ints, token_ids: Ints, config: LlamaConfig
) -> None:
    for i in np.flatnonzero((token_ids < 0) | (token_ids >= config.vocab_size)).tolist():
        problem = f"token ids must lie in [0, {config.vocab_size})"
        raise BatchError(rows[int(row_of_token[i])].request_id, problem)


def _block_tables(rows: Sequence[PlanRow], ends: Ints, num_blocks: int, block_size: int) -> Ints:
    """Return the tables, cut to what the rows reach; padding rows only reach the scratch block."""
    needed = -(-ends // block_size)
    tables = np.empty((len(rows), int(needed.max())), np.int64)
    for table, row, count in zip(tables, rows, needed.tolist(), strict=True):
        if row.is_padding:
            table[:] = num_blocks
            continue
        if len(row.block_ids) < count:
            problem = f"needs {count} blocks, its block table has {len(row.block_ids)}"
            raise BatchError(row.request_id, problem)
        table[:count] = row.block_ids[:count]
        table[count:] = row.block_ids[count - 1]
    is_padding = np.array([row.is_padding for row in rows], bool)
    outside = ((tables < 0) | (tables >= num_blocks)).any(axis=1) & ~is_padding
    for i in np.flatnonzero(outside).tolist():
        raise BatchError(rows[i].request_id, f"block ids must lie in [0, {num_blocks})")
    return tables
