import pytest

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


def test_rows_keep_what_they_reach_of_their_block_tables() -> None:
    rows = build(plan_row([5, 6, 7], [9, 4, 8, 8], start=2), decode_at(9)).rows
    assert rows.firsts.tolist() == [0, 3]
    assert rows.lengths.tolist() == [3, 1]
    assert rows.starts.tolist() == [2, 9]
    assert rows.block_tables.tolist() == [[9, 4, 4], [0, 1, 2]]


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
