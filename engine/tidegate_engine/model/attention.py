"""Attention over paged keys and values.

The pool is one tensor [N, L, 2, B, K, D]: keys at 0 and values at 1 of the third dimension. A block
is contiguous over layers, so that moving it is one copy. Tokens come before heads, so that the
gathered blocks of a sequence are its context [C, K, D] without a second copy, and a token's keys
are written in one piece.
"""

import torch
from torch import Tensor
from torch.nn import functional

from tidegate_engine.model.batch import AttentionGroup, Batch


class PagedAttention:
    """The attention of one step, layer by layer; writes the step's keys and values into `pool`."""

    def __init__(self, pool: Tensor, batch: Batch) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_size = pool.shape
        self._restore = batch.restore
        self._slots = pool.view(-1, num_kv_heads * head_size)
        self._slots_per_layer = 2 * block_size
        self._block_size = block_size
        # Where layer 0 keeps each token's key; its value is a block size further on.
        first = batch.blocks * (num_layers * self._slots_per_layer)
        self._key_slots = first + batch.offsets
        self._groups = tuple(_GroupAttention(pool, group) for group in batch.groups)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values, then attend to everything each row may see.

        Takes queries [T, H, D] and keys [T, K, D], rotated, and values [T, K, D]; returns
        [T, H * D].
        """
        # Before any read: tokens of a chunk look at each other through the pool.
        slots = self._key_slots + layer * self._slots_per_layer
        self._slots.index_copy_(0, slots, key.reshape(len(key), -1))
        self._slots.index_copy_(0, slots + self._block_size, value.reshape(len(value), -1))
        outputs = [group.attend(layer, query) for group in self._groups]
        together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return together.index_select(0, self._restore)


class _GroupAttention:
    """The rows of one group; S rows of Q queries over C positions."""

    def __init__(self, pool: Tensor, group: AttentionGroup) -> None:
        _, num_layers, _, block_size, num_kv_heads, head_size = pool.shape
        rows, num_blocks = group.block_tables.shape
        self._group = group
        self._pieces = pool.view(-1, block_size * num_kv_heads * head_size)
        self._key_pieces = group.block_tables.reshape(-1) * (num_layers * 2)
        self._context = (rows, num_blocks * block_size, num_kv_heads, head_size)
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
        # The query heads that share a KV head become further queries of it, G = H / K times as
        # many: [S, Q, K, G, D] -> [S, K, G * Q, D]. So keys and values needn't be repeated.
        num_queries = len(self._group.tokens) // rows
        num_shared = query.shape[1] // num_kv_heads
        split = (rows, num_queries, num_kv_heads, num_shared, head_size)
        queries = query.index_select(0, self._group.tokens).view(split).permute(0, 2, 3, 1, 4)
        out = functional.scaled_dot_product_attention(
            queries.reshape(rows, num_kv_heads, num_shared * num_queries, head_size),
            self._keys.view(self._context).transpose(1, 2),
            self._values.view(self._context).transpose(1, 2),
            attn_mask=self._group.mask,
        )
        out = out.view(rows, num_kv_heads, num_shared, num_queries, head_size)
        return out.permute(0, 3, 1, 2, 4).reshape(rows * num_queries, -1)
