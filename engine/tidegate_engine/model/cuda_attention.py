"""Attention on CUDA by libraries that read keys and values where they lie, when installed."""

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidegate_engine.model.attention import Attention, GatheredAttention, KvWriter
from tidegate_engine.model.batch import Batch, Ints
from tidegate_engine.model.config import LlamaConfig

_HALVES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 * 2**20
# What FlashAttention's pages must be a multiple of.
_FLASH_ATTENTION_BLOCK = 256


class Attentions:
    """Begins the attention of each step, by the fastest way that there is for a pool.

    FlashInfer where it is installed, since it takes blocks of any size; else FlashAttention, for
    blocks of 256; both in half precision on CUDA only. Everything else is gathered. FlexAttention
    isn't used: its blocks are of 128 positions and more, and it compiles itself anew for shapes.
    """

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config = config
        self._flash_infer: Any = None
        self._flash_attention: Any = None
        if device.type != "cuda" or dtype not in _HALVES:
            return
        if importlib.util.find_spec("flashinfer") is not None:
            library = importlib.import_module("flashinfer")
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._flash_infer = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        elif importlib.util.find_spec("flash_attn") is not None:
            self._flash_attention = importlib.import_module("flash_attn").flash_attn_varlen_func

    def begin(self, pool: Tensor, batch: Batch) -> Attention:
        """Begin a step."""
        if self._flash_infer is not None:
            return FlashInferAttention(self._flash_infer, self._config, pool, batch)
        if self._flash_attention is not None and pool.shape[3] % _FLASH_ATTENTION_BLOCK == 0:
            return FlashAttention(self._flash_attention, pool, batch)
        return GatheredAttention(pool, batch)


class FlashInferAttention:
    """By FlashInfer's kernel for chunks, of which a decode is one of a token."""

    def __init__(
        self,
        wrapper: Any,  # noqa: ANN401 - of a library that needn't be installed
        config: LlamaConfig,
        pool: Tensor,
        batch: Batch,
    ) -> None:
        self._wrapper = wrapper
        self._pool = pool
        self._writer = KvWriter(pool, batch)
        rows, block_size = batch.rows, pool.shape[3]
        ends = rows.starts + rows.lengths
        num_blocks = -(-ends // block_size)
        reached = np.arange(rows.block_tables.shape[1]) < num_blocks[:, None]
        wrapper.plan(
            _indices(_sums(rows.lengths), pool),
            _indices(_sums(num_blocks), pool),
            _indices(rows.block_tables[reached], pool),
            _indices((ends - 1) % block_size + 1, pool),
            config.num_heads,
            config.num_kv_heads,
            config.head_size,
            block_size,
            causal=True,
            q_data_type=pool.dtype,
            kv_data_type=pool.dtype,
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store, then attend."""
        self._writer.write(layer, key, value)
        attended: Tensor = self._wrapper.run(query.contiguous(), self._pool[:, layer])
        return attended.flatten(1)


class FlashAttention:
    """By FlashAttention 2, FlashAttention-2 (Dao, 2023), in its form for paged KV."""

    def __init__(
        self,
        function: Any,  # noqa: ANN401 - of a library that needn't be installed
        pool: Tensor,
        batch: Batch,
    ) -> None:
        self._function = function
        self._pool = pool
        self._writer = KvWriter(pool, batch)
        rows = batch.rows
        ends = rows.starts + rows.lengths
        self._queries = _indices(_sums(rows.lengths), pool)
        self._contexts = _indices(_sums(ends), pool)
        self._most = (int(rows.lengths.max()), int(ends.max()))
        self._tables = _indices(rows.block_tables, pool)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store, then attend."""
        self._writer.write(layer, key, value)
        attended: Tensor = self._function(
            query.contiguous(),
            self._pool[:, layer, 0],
            self._pool[:, layer, 1],
            self._queries,
            self._contexts,
            *self._most,
            causal=True,
            block_table=self._tables,
        )
        return attended.flatten(1)


def _sums(counts: Ints) -> Ints:
    """Where each begins, and where the last ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _indices(values: Ints, pool: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(pool.device)
