"""Attention over paged keys and values, in PyTorch's operations.

The pool is one tensor [N, L, 2, B, K, D]: keys at 0 and values at 1 of the third dimension. A block
is contiguous over layers, so that moving it is one copy. Tokens come before heads, so that the
gathered blocks of a sequence are its context [C, K, D] without a second copy, and a token's keys
are written in one piece.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model.batch import Batch, Ints, RowTable

# Contexts up to this many blocks are attended together however much their lengths differ: below
# it a kernel call costs more than the padding.
_MIN_GROUP_BLOCKS = 8


class Attention(Protocol):
    """The attention of one step, layer by layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values, then attend to everything each row may see.

        Takes queries [T, H, D] and keys [T, K, D], rotated, and values [T, K, D]; returns
        [T, H * D].
        """
        ...


class KvWriter:
    """Where a step's keys and values go."""

    def __init__(self, pool: Tensor, batch: Batch) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_size = pool.shape
        self._slots = pool.view(-1, num_kv_heads * head_size)
        self._slots_per_layer = 2 * block_size
        # Where layer 0 keeps each token's key, then where it keeps their values.
        keys = batch.blocks * (num_layers * self._slots_per_layer) + batch.offsets
        self._first_slots = torch.cat((keys, keys + block_size))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values [T, K, D] of a layer."""
        slots = self._first_slots + layer * self._slots_per_layer
        self._slots.index_copy_(0, slots, torch.cat((key, value)).flatten(1))


class GatheredAttention:
    """Copies each row's blocks together and calls PyTorch's attention: on any device."""

    def __init__(self, pool: Tensor, batch: Batch) -> None:
        self._writer = KvWriter(pool, batch)
        groups, restore = group_rows(batch.rows, pool.shape[3])
        self._restore = torch.from_numpy(restore).to(pool.device)
        self._groups = tuple(_GroupAttention(pool, group) for group in groups)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store, then attend."""
        # Before any read: tokens of a chunk look at each other through the pool.
        self._writer.write(layer, key, value)
        outputs = [group.attend(layer, query) for group in self._groups]
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, self._restore)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of similar lengths, attended in one kernel call.

    S rows, each padded to Q queries (the most new tokens of a row) and M blocks (the longest
    block table); C = M * B context positions.

    Attributes:
        tokens: Index of each query among the step's tokens [S, Q]; padding repeats the row's last.
        positions: Of the queries in their sequences [S, Q].
        block_tables: [S, M]; padding repeats the row's last block.
    """

    tokens: Ints
    positions: Ints
    block_tables: Ints


def group_rows(rows: RowTable, block_size: int) -> tuple[list[RowGroup], Ints]:
    """Group rows so that padding at most doubles their queries and contexts.

    Lengths are long-tailed: padding a whole batch to its longest row would cost many times the
    work, and a kernel call per row is what batching is to avoid.

    Returns:
        The groups, and where each token's output lies in theirs, one group's padded queries after
        the other's [T].
    """
    num_blocks = -(-(rows.starts + rows.lengths) // block_size)
    widths = np.ceil(np.log2(rows.lengths))
    heights = np.ceil(np.log2(np.maximum(num_blocks, _MIN_GROUP_BLOCKS)))
    _, group_of_row = np.unique(np.stack((widths, heights)), axis=1, return_inverse=True)
    restore = np.empty(int(rows.lengths.sum()), np.int64)
    groups = []
    num_queries = 0
    for group in range(int(group_of_row.max()) + 1):
        members = np.flatnonzero(group_of_row == group)
        lengths = rows.lengths[members, None]
        steps = np.arange(int(lengths.max()))
        places = np.minimum(steps, lengths - 1)
        tokens = rows.firsts[members, None] + places
        is_real = steps < lengths
        restore[tokens[is_real]] = num_queries + np.flatnonzero(is_real)
        num_queries += tokens.size
        groups.append(
            RowGroup(
                tokens=tokens,
                positions=rows.starts[members, None] + places,
                block_tables=rows.block_tables[members, : int(num_blocks[members].max())],
            )
        )
    return groups, restore


class _GroupAttention:
    """The rows of one group."""

    def __init__(self, pool: Tensor, group: RowGroup) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_size = pool.shape
        num_rows, num_blocks = group.block_tables.shape
        self._tokens = torch.from_numpy(group.tokens.reshape(-1)).to(pool.device)
        self._pieces = pool.view(-1, block_size * num_kv_heads * head_size)
        tables = torch.from_numpy(np.ascontiguousarray(group.block_tables)).to(pool.device)
        self._key_pieces = tables.reshape(-1) * (num_layers * 2)
        self._context = (num_rows, num_blocks * block_size, num_kv_heads, head_size)
        context = torch.arange(num_blocks * block_size, device=pool.device)
        positions = torch.from_numpy(group.positions).to(pool.device)
        hidden = context > positions[:, None, :, None]
        # Added to the scores [S, 1, Q, C].
        self._mask = pool.new_zeros(hidden.shape).masked_fill_(hidden, -np.inf)
        ends = positions.amax(dim=1) + 1
        # What others left behind a row's end may be NaN, which no mask hides.
        self._behind = (context >= ends[:, None]).flatten().nonzero().squeeze(1)
        # Gathered into the same memory layer after layer: fresh memory of this size would be
        # mapped, and its pages cleared, each time; that takes longer than the copy.
        self._keys = pool.new_empty(len(self._key_pieces), self._pieces.shape[1])
        self._values = torch.empty_like(self._keys)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return the output of the group's queries, padding included: [S * Q, H * D]."""
        index = self._key_pieces + layer * 2
        torch.index_select(self._pieces, 0, index, out=self._keys)
        torch.index_select(self._pieces, 0, index + 1, out=self._values)
        rows, _, num_kv_heads, head_size = self._context
        for gathered in (self._keys, self._values):
            gathered.view(-1, num_kv_heads * head_size).index_fill_(0, self._behind, 0.0)
        # The query heads that share a KV head become further queries of it, G = H / K times as
        # many: [S, Q, K, G, D] -> [S, K, G * Q, D]. So keys and values needn't be repeated.
        num_queries = len(self._tokens) // rows
        num_shared = query.shape[1] // num_kv_heads
        split = (rows, num_queries, num_kv_heads, num_shared, head_size)
        queries = query.index_select(0, self._tokens).view(split).permute(0, 2, 3, 1, 4)
        out = functional.scaled_dot_product_attention(
            queries.reshape(rows, num_kv_heads, num_shared * num_queries, head_size),
            self._keys.view(self._context).transpose(1, 2),
            self._values.view(self._context).transpose(1, 2),
            attn_mask=self._mask.repeat(1, 1, num_shared, 1),
        )
        out = out.view(rows, num_kv_heads, num_shared, num_queries, head_size)
        return out.permute(0, 3, 1, 2, 4).reshape(rows * num_queries, -1)
