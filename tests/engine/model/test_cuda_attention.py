"""What libraries on CUDA are told of a step, answered by plain code that takes it as documented."""

import pytest
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.attention import Attention, GatheredAttention
from tidegate_engine.model.batch import build_batch
from tidegate_engine.model.cuda_attention import FlashAttention, FlashInferAttention
from tidegate_testing.models import TINY, plan_row

BLOCK_SIZE = 4
LAYER = 1
H, K, D = TINY.num_heads, TINY.num_kv_heads, TINY.head_size


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last queries [Q, H, D] of a context [C, K, D]."""
    keys, values = (x.repeat_interleave(H // K, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,chd->hqc", queries, keys) / D**0.5
    hidden = torch.ones(scores.shape[1:]).triu(scores.shape[2] - scores.shape[1] + 1).bool()
    return torch.einsum("hqc,chd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


class PlainFlashInfer:
    """`BatchPrefillWithPagedKVCacheWrapper` in the layout NHD."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (H, K, D)
        assert page_size == BLOCK_SIZE
        assert q_data_type == kv_data_type
        self._queries, self._pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self._indices, self._last = paged_kv_indices.long(), paged_kv_last_page_len.tolist()

    def run(self, query: Tensor, pages: Tensor) -> Tensor:
        out = torch.empty_like(query)
        for i, last in enumerate(self._last):
            rows = slice(self._queries[i], self._queries[i + 1])
            own = self._indices[self._pages[i] : self._pages[i + 1]]
            count = (len(own) - 1) * BLOCK_SIZE + last
            keys, values = pages[own].transpose(0, 1).reshape(2, -1, K, D)[:, :count]
            out[rows] = attend_causally(query[rows], keys, values)
        return out


def plain_flash_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """`flash_attn_varlen_func` with paged keys and values."""
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    out = torch.empty_like(query)
    starts = cu_seqlens_q.tolist()
    for i, count in enumerate(cu_seqlens_k.diff().tolist()):
        rows, own = slice(starts[i], starts[i + 1]), block_table[i].long()
        context = (x[own].reshape(-1, K, D)[:count] for x in (keys, values))
        out[rows] = attend_causally(query[rows], *context)
    return out


def mixed_rows() -> list[PlanRow]:
    blocks = iter(torch.randperm(60).tolist())
    return [
        plan_row([0] * count, [next(blocks) for _ in range(-(-(start + count) // 4))], start=start)
        for start, count in ((3, 6), (20, 1), (0, 30), (0, 1), (7, 1), (1, 3))
    ]


@pytest.mark.parametrize("library", ["flashinfer", "flash_attn"])
def test_rows_are_described_as_the_library_documents(library: str) -> None:
    torch.manual_seed(0)
    rows = mixed_rows()
    batch = build_batch(rows, TINY, num_blocks=60, block_size=BLOCK_SIZE)
    pools = [torch.randn(61, TINY.num_layers, 2, BLOCK_SIZE, K, D)]
    pools.append(pools[0].clone())
    count = len(batch.positions)
    query, (key, value) = torch.randn(count, H, D), torch.randn(2, count, K, D)
    attention: Attention
    if library == "flashinfer":
        attention = FlashInferAttention(PlainFlashInfer(), TINY, pools[0], batch)
    else:
        attention = FlashAttention(plain_flash_attention, pools[0], batch)
    ours = attention.attend(LAYER, query, key, value)
    theirs = GatheredAttention(pools[1], batch).attend(LAYER, query, key, value)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert torch.equal(pools[0], pools[1])
