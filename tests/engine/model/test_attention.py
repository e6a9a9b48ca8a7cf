import numpy as np
import torch
from torch import Tensor

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.attention import GatheredAttention, RowGroup, group_rows
from tidegate_engine.model.batch import build_batch
from tidegate_testing.models import TINY, plan_row

BLOCK_SIZE = 4
LAYER = 1
H, K, D = TINY.num_heads, TINY.num_kv_heads, TINY.head_size


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [H, D] over a context [C, K, D], written out head by head."""
    out = []
    for head in range(H):
        kv_head = head * K // H
        scores = keys[:, kv_head] @ query[head] / D**0.5
        out.append(scores.softmax(0) @ values[:, kv_head])
    return torch.cat(out)


def test_paged_attention_is_dense_attention_over_each_rows_own_tokens() -> None:
    torch.manual_seed(0)
    before = torch.randn(120, TINY.num_layers, 2, BLOCK_SIZE, K, D)
    # What others have, or left behind, must not matter, even where padding reads it.
    pool = torch.full_like(before, torch.nan)
    shuffled = (1 + torch.randperm(119)).tolist()
    rows, contexts = [], []
    taken = 0
    for start, count in ((3, 6), (21, 1), (0, 30), (0, 1), (130, 2), (60, 1), (1, 29)):
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        blocks = shuffled[taken : taken + num_blocks]
        taken += num_blocks
        pool[blocks] = before[blocks]
        for position in range(start, num_blocks * BLOCK_SIZE):
            pool[blocks[position // BLOCK_SIZE], :, :, position % BLOCK_SIZE] = torch.nan
        rows.append(plan_row([0] * count, blocks, start=start))
        contexts.append(before[blocks, LAYER].transpose(0, 1).reshape(2, -1, K, D).clone())
    num_tokens = sum(len(row.token_ids) for row in rows)
    query = torch.randn(num_tokens, H, D)
    key, value = torch.randn(2, num_tokens, K, D)

    batch = build_batch(rows, TINY, num_blocks=120, block_size=BLOCK_SIZE)
    out = GatheredAttention(pool, batch).attend(LAYER, query, key, value)

    at = 0
    for row, (keys, values) in zip(rows, contexts, strict=True):
        for position in range(row.start, row.end):
            keys[position], values[position] = key[at], value[at]
            expected = dense(query[at], keys[: position + 1], values[: position + 1])
            assert torch.allclose(out[at], expected, rtol=0, atol=1e-5)
            at += 1


def test_only_the_rows_own_slots_of_the_layer_are_written() -> None:
    pool = torch.zeros(4, TINY.num_layers, 2, BLOCK_SIZE, K, D)
    row: PlanRow = plan_row([0, 0], [2, 0], start=3)
    batch = build_batch([row], TINY, num_blocks=4, block_size=BLOCK_SIZE)
    key, value = torch.full((2, K, D), 2.0), torch.full((2, K, D), 3.0)
    GatheredAttention(pool, batch).attend(LAYER, torch.zeros(2, H, D), key, value)
    expected = torch.zeros_like(pool)
    for block, offset in ((2, 3), (0, 0)):
        expected[block, LAYER, 0, offset] = 2.0
        expected[block, LAYER, 1, offset] = 3.0
    assert torch.equal(pool, expected)


def groups_of(*rows: PlanRow) -> list[RowGroup]:
    batch = build_batch(rows, TINY, num_blocks=100, block_size=BLOCK_SIZE)
    return group_rows(batch.rows, BLOCK_SIZE)[0]


def decode_at(position: int) -> PlanRow:
    return plan_row([5], [*range(position // BLOCK_SIZE + 1)], start=position)


def test_decodes_of_similar_length_are_one_group() -> None:
    assert len(groups_of(*(decode_at(position) for position in (0, 3, 9, 31)))) == 1


def test_padding_at_most_doubles_contexts_and_queries() -> None:
    rows = [decode_at(position) for position in (31, 32, 40, 63, 64, 200, 255, 399)]
    rows += [plan_row([5] * n, [*range(50)]) for n in (1, 2, 3, 30, 100, 199)]
    for group in groups_of(*rows):
        _, num_blocks = group.block_tables.shape
        assert group.positions.max(axis=1).min() >= num_blocks * BLOCK_SIZE / 2 or num_blocks <= 8
        distinct = [len(set(tokens)) for tokens in group.tokens.tolist()]
        assert min(distinct) > group.tokens.shape[1] / 2 or group.tokens.shape[1] == 1


def test_every_tokens_output_is_found_among_the_groups() -> None:
    rows = [plan_row([5] * n, [*range(50)]) for n in (7, 1, 100, 1, 6)]
    batch = build_batch(rows, TINY, num_blocks=100, block_size=BLOCK_SIZE)
    groups, restore = group_rows(batch.rows, BLOCK_SIZE)
    padded = np.concatenate([group.tokens.reshape(-1) for group in groups])
    assert padded.tolist() != list(range(115))
    assert padded[restore].tolist() == list(range(115))
