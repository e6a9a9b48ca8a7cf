import pytest

from tidegate_engine.core.plan import BlockCopy, PlanRow, StepPlan, SwapCopy
from tidegate_engine.executor.base import Capacity, ExecutorError
from tidegate_engine.executor.open_swaps import BlockError, OpenSwaps
from tidegate_testing.models import plan_row

OUT_OF_5 = SwapCopy(1, "a", (5, 6), (0, 1))
ALSO_OUT_OF_5 = SwapCopy(2, "b", (5,), (2,))
INTO_7 = SwapCopy(3, "c", (7,), (3,))


@pytest.fixture
def swaps() -> OpenSwaps:
    """Device blocks 5 and 6 are read, 5 by two, and 7 is written."""
    open_swaps = OpenSwaps(Capacity(num_blocks=12, num_host_blocks=6, block_size=4))
    open_swaps.begin(plan(swap_out=(OUT_OF_5, ALSO_OUT_OF_5), swap_in=(INTO_7,)))
    return open_swaps


def plan(
    *rows: PlanRow,
    swap_out: tuple[SwapCopy, ...] = (),
    swap_in: tuple[SwapCopy, ...] = (),
    copies: tuple[BlockCopy, ...] = (),
) -> StepPlan:
    return StepPlan(
        step=1, revision=1, rows=rows, swap_out=swap_out, swap_in=swap_in, copies=copies
    )


def row(blocks: list[int], *, start: int) -> PlanRow:
    """Build a row that writes the block of position `start`, and reads those before it."""
    return plan_row([1], blocks, start=start)


@pytest.mark.parametrize(
    "touching",
    [
        plan(row([5, 8], start=4)),
        plan(copies=(BlockCopy(5, 8),)),
        plan(swap_out=(SwapCopy(4, "d", (5,), (4,)),)),
    ],
    ids=["row", "copy", "swap-out"],
)
def test_what_a_swap_reads_may_be_read(swaps: OpenSwaps, touching: StepPlan) -> None:
    swaps.begin(touching)


@pytest.mark.parametrize(
    ("touching", "block"),
    [
        (plan(row([8, 5], start=4)), 5),
        (plan(copies=(BlockCopy(8, 6),)), 6),
        (plan(swap_in=(SwapCopy(4, "d", (6,), (4,)),)), 6),
        (plan(row([7, 8], start=4)), 7),
        (plan(row([8, 7], start=4)), 7),
        (plan(copies=(BlockCopy(7, 8),)), 7),
        (plan(copies=(BlockCopy(8, 7),)), 7),
        (plan(swap_out=(SwapCopy(4, "d", (7,), (4,)),)), 7),
        (plan(swap_in=(SwapCopy(4, "d", (7,), (4,)),)), 7),
        (plan(swap_out=(SwapCopy(4, "d", (8,), (0,)),)), 0),
        (plan(swap_in=(SwapCopy(4, "d", (8,), (3,)),)), 3),
    ],
)
def test_what_a_swap_reads_is_not_written_and_what_it_writes_not_touched(
    swaps: OpenSwaps, touching: StepPlan, block: int
) -> None:
    with pytest.raises(BlockError, match="belongs to an open swap") as refused:
        swaps.begin(touching)
    assert refused.value.block == block
    assert len(swaps) == 3


def test_a_block_that_two_swaps_read_is_free_with_the_last_of_them(swaps: OpenSwaps) -> None:
    writing = plan(row([5], start=0))
    assert swaps.end(1) is OUT_OF_5
    with pytest.raises(BlockError):
        swaps.begin(writing)
    assert swaps.end(2) is ALSO_OUT_OF_5
    swaps.begin(writing)
    swaps.begin(plan(swap_in=(SwapCopy(4, "d", (6,), (0,)),)))


def test_a_block_that_a_swap_wrote_may_be_used_once_it_has_ended(swaps: OpenSwaps) -> None:
    swaps.end(3)
    swaps.begin(plan(row([7], start=0), swap_out=(SwapCopy(4, "d", (8,), (3,)),)))


def test_a_plan_that_is_refused_opens_none_of_its_swaps(swaps: OpenSwaps) -> None:
    with pytest.raises(BlockError):
        swaps.begin(plan(row([7], start=0), swap_out=(SwapCopy(4, "d", (8,), (4,)),)))
    swaps.begin(plan(row([8], start=0), swap_in=(SwapCopy(4, "d", (9,), (4,)),)))


def test_a_swap_may_not_read_what_its_own_plan_writes() -> None:
    swaps = OpenSwaps(Capacity(num_blocks=12, num_host_blocks=6, block_size=4))
    with pytest.raises(BlockError):
        swaps.begin(plan(row([5], start=0), swap_out=(OUT_OF_5,)))
    with pytest.raises(ExecutorError, match="its fence is open already"):
        swaps.begin(plan(swap_out=(OUT_OF_5, SwapCopy(1, "b", (9,), (4,)))))
    assert len(swaps) == 0
