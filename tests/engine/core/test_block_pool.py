from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tidegate_engine.core.block_pool import BlockPool, OutOfBlocksError


def cached_prefix(pool: BlockPool, *keys: bytes) -> list[int]:
    """Allocate, register and release as many blocks as there are keys."""
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
    pool.release(blocks)
    return blocks


# --- allocate ---


def test_a_pool_of_blocks_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="4 blocks of 0 tokens"):
        BlockPool(num_blocks=4, block_size=0)


def test_a_pool_may_have_no_blocks_to_lend() -> None:
    pool = BlockPool(num_blocks=0, block_size=4)
    assert (pool.num_free, pool.allocate(0)) == (0, [])


def test_tokens_need_whole_blocks() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 4, 5, 16)] == [0, 1, 1, 2, 4]


def test_an_allocated_block_has_one_reference_and_is_exclusive() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    (single,) = pool.allocate(1)
    several = pool.allocate(2)
    assert [pool.references(block) for block in (single, *several)] == [1, 1, 1]
    assert pool.is_exclusive(single)
    assert (pool.num_free, pool.num_used, pool.num_cached) == (0, 3, 0)


def test_an_allocation_from_an_exhausted_pool_changes_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    held = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="needed 1 KV blocks, 0 free"):
        pool.allocate(1)
    pool.check_invariants(dict.fromkeys(held, 1))


def test_an_allocation_that_does_not_fit_forgets_nothing() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    cached = cached_prefix(pool, b"a")
    with pytest.raises(OutOfBlocksError, match="needed 3 KV blocks, 2 free") as refused:
        pool.allocate(3)
    assert (refused.value.needed, refused.value.free) == (3, 2)
    assert (pool.num_free, pool.match([b"a"])) == (2, cached)
    pool.check_invariants({})


def test_blocks_are_handed_out_in_the_same_order_every_time_and_warm_ones_again() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert pool.allocate(3) == [0, 1, 3]


def test_blocks_without_content_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    cached = cached_prefix(pool, b"a", b"b")
    assert pool.num_free == 4
    assert not set(pool.allocate(2)) & set(cached)
    assert pool.match([b"a", b"b"]) == cached


def test_the_least_recently_used_content_is_forgotten_first() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = [cached_prefix(pool, key)[0] for key in (b"a", b"b", b"c")]
    pool.share(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(1) == [blocks[1]]
    assert [pool.match([key]) for key in (b"a", b"b", b"c")] == [[blocks[0]], [], [blocks[2]]]


def test_one_allocation_takes_free_blocks_then_cached_ones() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    a, b = cached_prefix(pool, b"a", b"b")
    assert pool.allocate(3) == [2, b, a]
    assert pool.match([b"a"]) == []


# --- share and release ---


def test_sharing_says_how_many_blocks_were_free() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    cached = cached_prefix(pool, b"a", b"b")
    (used,) = pool.allocate(1)
    assert pool.share(iter([*cached, used])) == 2
    assert [pool.references(block) for block in (*cached, used)] == [1, 1, 2]
    assert (pool.num_cached, pool.num_free) == (0, 1)
    assert pool.share(cached) == 0
    assert not pool.is_exclusive(cached[0])


def test_sharing_a_block_without_content_is_refused_and_changes_nothing() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    cached = cached_prefix(pool, b"a")
    with pytest.raises(ValueError, match="block 2 is free"):
        pool.share([*cached, 2])
    pool.check_invariants({})


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    assert pool.release(blocks) == 1
    assert (pool.num_free, pool.references(blocks[0])) == (1, 1)
    assert pool.release(blocks[:1]) == 1
    assert (pool.num_free, pool.num_used) == (2, 0)


def test_a_released_block_stays_findable_only_if_it_was_registered() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    blocks = pool.allocate(2)
    pool.register(blocks[0], b"a")
    assert pool.release(blocks) == 2
    assert (pool.num_free, pool.num_cached) == (4, 1)
    assert pool.match([b"a"]) == [blocks[0]]


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = cached_prefix(pool, b"a", b"b", b"c")
    pool.allocate(1)
    assert pool.match([b"a", b"b", b"c"]) == blocks[:2]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_two_prefixes_share_is_forgotten_after_both_ends(order: tuple[int, int]) -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    common, left, right = pool.allocate(3)
    for block, key in ((common, b"c"), (left, b"l"), (right, b"r")):
        pool.register(block, key)
    pool.share([common])
    tables = [common, left], [common, right]
    for index in order:
        pool.release(tables[index])
    pool.allocate(2)
    assert pool.match([b"c"]) == [common]


@pytest.mark.parametrize(
    ("released", "complaint"),
    [
        ([0, 1, 2], "block 2 is released 1 times but held 0 times"),
        ([0, 1, 0, 1, 1], "block 1 is released 3 times but held 1 times"),
    ],
)
def test_releasing_more_than_is_held_names_the_block_and_changes_nothing(
    released: list[int], complaint: str
) -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    pool.allocate(2)
    pool.share([0])
    with pytest.raises(ValueError, match=complaint):
        pool.release(released)
    pool.check_invariants({0: 2, 1: 1})


def test_a_holder_of_the_same_block_twice_can_release_both_at_once() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.release([block, block]) == 1
    pool.check_invariants({})


def test_releasing_nothing_frees_nothing() -> None:
    assert BlockPool(num_blocks=3, block_size=4).release([]) == 0


# --- register and match ---


def test_the_first_block_registered_under_a_key_stays() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    assert pool.match([b"a"]) == [first]
    pool.release([first, second])
    assert (pool.num_cached, pool.match([b"a"])) == (1, [first])


def test_registering_twice_under_one_key_is_once() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    pool.register(block, b"a")
    assert pool.match([b"a"]) == [block]


def test_a_block_that_is_no_longer_registered_is_not_found_and_may_be_again() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.unregister([first, second])
    assert pool.match([b"a"]) == []
    pool.register(second, b"a")
    assert pool.match([b"a"]) == [second]
    pool.check_invariants({first: 1, second: 1})


def test_a_registered_block_takes_no_other_key() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    (block,) = pool.allocate(1)
    pool.register(block, b"a")
    with pytest.raises(ValueError, match="block 0 is registered under another key"):
        pool.register(block, b"b")
    assert pool.match([b"b"]) == []


def test_a_block_that_nobody_holds_takes_no_key() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="block 0 is free: it has no content to register"):
        pool.register(0, b"a")
    assert pool.match([b"a"]) == []


def test_a_block_whose_content_was_forgotten_takes_a_new_key() -> None:
    pool = BlockPool(num_blocks=1, block_size=4)
    cached_prefix(pool, b"a")
    cached_prefix(pool, b"b")
    assert (pool.match([b"a"]), pool.match([b"b"])) == ([], [0])


def test_a_match_ends_at_the_first_unknown_key_and_holds_nothing() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    blocks = cached_prefix(pool, b"a", b"b", b"d")
    assert pool.match([b"a", b"b", b"c", b"d"]) == blocks[:2]
    assert pool.match([]) == []
    assert (pool.num_cached, pool.num_used) == (3, 0)


# --- check_invariants ---


def free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def lose_a_free_block(pool: BlockPool) -> None:
    pool._free.pop()


def free_a_used_block(pool: BlockPool) -> None:
    pool._free.append(0)


def free_an_unknown_block(pool: BlockPool) -> None:
    pool._free.append(-1)


def forget_half_of_a_cached_block(pool: BlockPool) -> None:
    pool._keys[1] = None


def free_a_registered_block(pool: BlockPool) -> None:
    del pool._cached[1]
    pool._free.append(1)


def register_two_blocks_under_one_key(pool: BlockPool) -> None:
    pool._keys[0] = b"a"


def lose_a_key(pool: BlockPool) -> None:
    pool._keys[0] = b"b"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (free_twice, "block 3 with 0 references is free or cached 2 times"),
        (lose_a_free_block, "block 2 with 0 references is free or cached 0 times"),
        (free_a_used_block, "block 0 with 1 references is free or cached 1 times"),
        (free_an_unknown_block, "1 used \\+ 4 free is not 4"),
        (forget_half_of_a_cached_block, "cached block 1 is not registered"),
        (free_a_registered_block, "free block 1 is registered"),
        (register_two_blocks_under_one_key, "keys of blocks and the blocks of keys differ"),
        (lose_a_key, "keys of blocks and the blocks of keys differ"),
    ],
)
def test_the_check_finds_what_is_wrong_inside(
    damage: Callable[[BlockPool], None], complaint: str
) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.allocate(1)
    cached_prefix(pool, b"a")
    pool.check_invariants({0: 1})
    damage(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants({0: 1})


@pytest.mark.parametrize(
    ("holders", "complaint"),
    [
        ({}, "block 0 has 1 references and 0 holders"),
        ({0: 2}, "block 0 has 1 references and 2 holders"),
        ({0: 1, 1: 1}, "block 1 has 0 references and 1 holders"),
        ({0: 1, 4: 1}, "blocks held that the pool doesn't have: \\[4\\]"),
    ],
)
def test_the_check_finds_holders_that_were_not_counted(
    holders: dict[int, int], complaint: str
) -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants(holders)


# --- any interleaving ---

KEYS = [b"a", b"b", b"c", b"d", b"e", b"f"]
NUM_BLOCKS = 7


class BlockPoolMachine(RuleBasedStateMachine):
    """Any interleaving leaves the pool as a naive account of tables, keys and recency says."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=4)
        self.tables: list[list[int]] = []
        self.key_of: dict[int, bytes] = {}
        self.cached: list[int] = []  # oldest first

    def holders(self) -> Counter[int]:
        return Counter(block for table in self.tables for block in table)

    def empty(self) -> list[int]:
        taken = {*self.holders(), *self.cached}
        return [block for block in range(NUM_BLOCKS) if block not in taken]

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        empty = self.empty()
        if count > len(empty) + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert set(blocks[: len(empty)]) <= set(empty)
        short = max(0, count - len(empty))
        forgotten, self.cached = self.cached[:short], self.cached[short:]
        assert blocks[len(empty) :] == forgotten
        for block in forgotten:
            del self.key_of[block]
        self.tables.append(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        were_free = set(blocks) & set(self.cached)
        assert self.pool.share(blocks) == len(were_free)
        self.cached = [block for block in self.cached if block not in were_free]
        self.tables.append(list(blocks))

    @rule(keys=st.permutations(KEYS))
    def match_and_share(self, keys: list[bytes]) -> None:
        block_of = {key: block for block, key in self.key_of.items()}
        expected = []
        for key in keys:
            if key not in block_of:
                break
            expected.append(block_of[key])
        assert self.pool.match(keys) == expected
        self.take(expected)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
        if set(blocks) & set(self.empty()):
            with pytest.raises(ValueError, match="no content to share"):
                self.pool.share(blocks)
        else:
            self.take(blocks)

    @rule(block=st.integers(0, NUM_BLOCKS - 1), key=st.sampled_from(KEYS))
    def register(self, block: int, key: bytes) -> None:
        known = self.key_of.get(block)
        if known not in (None, key) or (known is None and not self.holders()[block]):
            with pytest.raises(ValueError, match=r"registered under another key|no content"):
                self.pool.register(block, key)
            return
        self.pool.register(block, key)
        if key not in self.key_of.values():
            self.key_of[block] = key

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        left = self.holders()
        gone = [block for block in dict.fromkeys(table) if not left[block]]
        assert self.pool.release(table) == len(gone)
        # A block that is in the table twice is let go with its first place in it.
        self.cached += [block for block in reversed(gone) if block in self.key_of]

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6))
    def release_too_much(self, blocks: list[int]) -> None:
        if not Counter(blocks) <= self.holders():
            with pytest.raises(ValueError, match="but held"):
                self.pool.release(blocks)

    @invariant()
    def pool_agrees_with_the_account(self) -> None:
        holders = self.holders()
        self.pool.check_invariants(holders)
        assert list(self.pool._cached) == self.cached
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len(holders)
        assert self.pool.num_free == NUM_BLOCKS - len(holders)
        for key in KEYS:
            expected = [block for block, known in self.key_of.items() if known == key]
            assert self.pool.match([key]) == expected
        for block in range(NUM_BLOCKS):
            assert self.pool.references(block) == holders[block]
            assert self.pool.is_exclusive(block) == (holders[block] == 1)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=100, deadline=None)
