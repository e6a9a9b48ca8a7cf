import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.core.block_pool import BlockPool
from tidegate_engine.core.prefix_cache import BlockKeys, root_key

tokens = st.integers(0, 2**32 - 1)


def keys_of(token_ids: list[int], *, tenant: str = "gold", block_size: int = 4) -> list[bytes]:
    keys = BlockKeys(root_key(tenant), block_size)
    return list(keys.upto(token_ids, len(token_ids) // block_size))


def test_a_key_is_the_hash_of_the_key_before_and_the_blocks_tokens() -> None:
    root = root_key("gold")
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 2**32 - 1)).digest()
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 2**32 - 1]) == [first, second]


def test_the_same_tokens_have_the_same_keys_in_every_engine() -> None:
    assert root_key("gold").hex()[:16] == "2d2c63b6dba231eb"
    assert keys_of(list(range(8)))[1].hex()[:16] == "e47d5fcea213c478"


@given(st.lists(tokens, min_size=4, max_size=24), st.data())
def test_a_key_says_all_tokens_up_to_the_blocks_end_and_none_after_it(
    token_ids: list[int], data: st.DataObject
) -> None:
    changed_at = data.draw(st.integers(0, len(token_ids) - 1))
    changed = list(token_ids)
    changed[changed_at] ^= 1
    before, after = keys_of(token_ids), keys_of(changed)
    same = changed_at // 4
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


def test_equal_blocks_behind_different_prefixes_have_different_keys() -> None:
    repeated = keys_of([7] * 16)
    assert len(set(repeated)) == 4


@given(st.lists(tokens, min_size=4, max_size=24))
def test_no_key_of_one_tenant_is_a_key_of_another(token_ids: list[int]) -> None:
    assert not set(keys_of(token_ids, tenant="gold")) & set(keys_of(token_ids, tenant="silver"))


def test_one_tenants_prompt_finds_no_block_of_another() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    prompt = list(range(8))
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys_of(prompt, tenant="gold"), strict=True):
        pool.register(block, key)
    assert pool.match(keys_of(prompt, tenant="gold")) == blocks
    assert pool.match(keys_of(prompt, tenant="silver")) == []


def test_tenants_of_similar_names_have_different_roots() -> None:
    names = ["", "a", "aa", "é", "unknown"]
    assert len({root_key(name) for name in names}) == len(names)


@given(
    st.lists(tokens, min_size=1, max_size=40),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_a_growing_sequence_has_the_keys_that_it_would_have_whole(
    token_ids: list[int], lengths: list[int]
) -> None:
    keys = BlockKeys(root_key("gold"), 4)
    whole = keys_of(token_ids)
    for length in lengths:
        known = token_ids[:length]
        assert list(keys.upto(known, len(known) // 4)) == whole[: len(known) // 4]


def test_keys_once_computed_are_not_computed_again() -> None:
    keys = BlockKeys(root_key("gold"), 4)
    first = list(keys.upto([1, 2, 3, 4], 1))
    assert keys.upto([], 1) == first
    assert keys.upto([9, 9, 9, 9, 5, 6, 7, 8], 2) == keys_of([1, 2, 3, 4, 5, 6, 7, 8])


def test_the_keys_of_the_last_blocks_alone_are_those_of_the_whole_chain() -> None:
    token_ids = list(range(16))
    keys = BlockKeys(root_key("gold"), 4)
    assert keys.upto(token_ids, 4, start=3) == keys_of(token_ids)[3:]
    assert keys.upto(token_ids, 3, start=1) == keys_of(token_ids)[1:3]


def test_what_was_returned_does_not_grow_with_the_sequence() -> None:
    keys = BlockKeys(root_key("gold"), 4)
    first = keys.upto([1, 2, 3, 4], 1)
    keys.upto([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert len(first) == 1


def test_a_block_that_is_not_full_has_no_key() -> None:
    keys = BlockKeys(root_key("gold"), 4)
    with pytest.raises(ValueError, match="7 tokens don't fill 2 blocks of 4"):
        keys.upto([1, 2, 3, 4, 5, 6, 7], 2)
    assert list(keys.upto([1, 2, 3, 4], 1)) == keys_of([1, 2, 3, 4])
