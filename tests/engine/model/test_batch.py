import pytest
import torch

from tidegate_engine.core.plan import PlanRow
from tidegate_engine.model.batch import Batch, BatchError, build_batch
from tidegate_testing.models import TINY, plan_row

BLOCK_SIZE = 4


def build(*rows: PlanRow) -> Batch:
    return build_batch(rows, TINY, num_blocks=100, block_size=BLOCK_SIZE)


def decode_at(position: int, request_id: str = "r") -> PlanRow:
    blocks = [*range(position // BLOCK_SIZE + 1)]
    return plan_row([5], blocks, start=position, request_id=request_id)


def test_every_token_goes_to_its_place_in_its_rows_block_table() -> None:
    batch = build(plan_row([5, 6, 7], [9, 4], start=2), plan_row([8], [7], start=1))
    assert batch.positions.tolist() == [2, 3, 4, 1]
    assert batch.blocks.tolist() == [9, 9, 4, 7]
    assert batch.offsets.tolist() == [2, 3, 0, 1]


def test_only_last_tokens_of_sampling_rows_are_sampled() -> None:
    batch = build(
        plan_row([5, 6], [0]), plan_row([5, 6, 7], [1], samples=False), plan_row([8], [2])
    )
    assert batch.sampled.tolist() == [1, 5]


def test_decodes_of_similar_length_are_one_group() -> None:
    batch = build(*(decode_at(position) for position in (0, 3, 9, 31)))
    assert len(batch.groups) == 1


def test_padding_at_most_doubles_contexts_and_queries() -> None:
    rows = [decode_at(position) for position in (31, 32, 40, 63, 64, 200, 255, 399)]
    rows += [plan_row([5] * n, [*range(50)]) for n in (1, 2, 3, 30, 100, 199)]
    batch = build(*rows)
    for group in batch.groups:
        num_rows, num_blocks = group.block_tables.shape
        queries, context = group.mask.shape[2] // 2, group.mask.shape[3]
        assert context == num_blocks * BLOCK_SIZE
        visible = (group.mask[:, 0, :queries] == 0).sum(dim=-1)
        assert visible.max(dim=-1).values.min() > min(context, 32) / 2 or num_blocks <= 8
        distinct = [len(set(tokens)) for tokens in group.tokens.view(num_rows, -1).tolist()]
        assert min(distinct) > queries / 2 or queries == 1


def test_restoring_finds_every_token_once() -> None:
    rows = [plan_row([5] * n, [*range(50)]) for n in (7, 1, 100, 1, 6)]
    batch = build(*rows)
    padded = torch.cat([group.tokens for group in batch.groups])
    assert padded.tolist() != list(range(115))
    assert padded[batch.restore].tolist() == list(range(115))


def test_a_query_sees_its_past_and_itself_only() -> None:
    (group,) = build(plan_row([5, 6, 7], [3, 8], start=2)).groups
    seen = (group.mask[0, 0] == 0).sum(dim=-1).tolist()
    assert seen == [3, 4, 5] * 2  # two query heads share a KV head


def test_padding_rows_are_laid_out_in_the_block_behind_all_others() -> None:
    padding = plan_row([5, 6], [3, 8], start=3, samples=False)._replace(is_padding=True)
    batch = build(plan_row([5], [9]), padding)
    assert batch.blocks.tolist() == [9, 100, 100]
    assert batch.sampled.tolist() == [0]


def test_a_padding_row_needs_no_block_table() -> None:
    padding = plan_row([5], [], start=9, samples=False)._replace(is_padding=True)
    assert build(padding).blocks.tolist() == [100]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (plan_row([], [0]), "0 tokens"),
        (plan_row([1], [0], start=-1), "1 tokens from -1"),
        (plan_row([1] * 5, [0]), "needs 2 blocks, its block table has 1"),
        (plan_row([1], [100]), r"block ids must lie in \[0, 100\)"),
        (plan_row([1], [-1]), r"block ids must lie in \[0, 100\)"),
        (plan_row([TINY.vocab_size], [0]), "token ids must lie in"),
        (plan_row([1], [0], start=512), "context is 512"),
    ],
)
def test_a_row_that_cannot_be_computed_is_named(row: PlanRow, problem: str) -> None:
    with pytest.raises(BatchError, match=problem) as caught:
        build(plan_row([1], [0], request_id="fine"), row)
    assert caught.value.request_id == "r"
