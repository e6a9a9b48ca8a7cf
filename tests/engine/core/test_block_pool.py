import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_engine.core.block_pool import BlockPool, OutOfBlocksError


def test_failed_growth_changes_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    table: list[int] = []
    with pytest.raises(OutOfBlocksError, match="needed 3 KV blocks, 2 free"):
        pool.grow(table, num_tokens=9)
    assert (table, pool.num_free) == ([], 2)


def test_a_table_grows_by_whole_blocks_only_when_it_must() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    table: list[int] = []
    assert [pool.grow(table, num_tokens=n) for n in (1, 4, 5, 5, 16)] == [1, 0, 1, 0, 2]
    assert pool.num_used == 4


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 4 tokens"):
        BlockPool(num_blocks=0, block_size=4)


def test_the_check_finds_a_shared_block() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    table: list[int] = []
    pool.grow(table, num_tokens=4)
    with pytest.raises(AssertionError, match="do not partition"):
        pool.check_invariants([table, table])


class BlockPoolMachine(RuleBasedStateMachine):
    """Any interleaving of growth and release keeps every block accounted for."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=8, block_size=4)
        self.tables: list[list[int]] = [[]]

    @rule(num_tokens=st.integers(1, 40))
    def begin(self, num_tokens: int) -> None:
        table: list[int] = []
        if self.pool.blocks_for(num_tokens) <= self.pool.num_free:
            self.pool.grow(table, num_tokens=num_tokens)
            self.tables.append(table)

    @rule(data=st.data(), num_tokens=st.integers(1, 16))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        needed = self.pool.blocks_for(num_tokens)
        if needed > self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.pool.grow(table, num_tokens=len(table) * 4 + num_tokens)
        else:
            assert self.pool.grow(table, num_tokens=len(table) * 4 + num_tokens) == needed

    @precondition(lambda self: len(self.tables) > 1)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(1, len(self.tables) - 1))))

    @invariant()
    def blocks_partition_the_pool(self) -> None:
        self.pool.check_invariants(self.tables)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=50, deadline=None)
