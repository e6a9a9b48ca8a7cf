import resource
from pathlib import Path

import pytest
import torch

from tidegate_engine.executor.kv_cache import KvCache, KvCacheError
from tidegate_testing.models import TINY


def test_a_block_is_one_piece_of_memory_over_all_layers() -> None:
    cache = KvCache.allocate(TINY, num_blocks=5, block_size=4)
    assert cache.pool.shape == (5, TINY.num_layers, 2, 4, TINY.num_kv_heads, TINY.head_size)
    assert cache.pool[3].is_contiguous()
    assert (cache.num_blocks, cache.block_size) == (5, 4)


def test_unused_blocks_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    cache = KvCache.allocate(TINY, num_blocks=100_000, block_size=16)
    assert cache.pool.nbytes > 400e6
    assert resident_bytes() - before < 40e6
    assert not cache.pool[99_999].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_block_is_known_before_it_is_allocated(dtype: torch.dtype) -> None:
    cache = KvCache.allocate(TINY, num_blocks=1, block_size=16, dtype=dtype)
    assert KvCache.block_bytes(TINY, 16, dtype) == cache.pool.nbytes


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "parameter"), [(0, 1, "num_blocks"), (1, 0, "block_size")]
)
def test_a_pool_without_room_is_refused(num_blocks: int, block_size: int, parameter: str) -> None:
    with pytest.raises(KvCacheError, match=parameter) as caught:
        KvCache.allocate(TINY, num_blocks=num_blocks, block_size=block_size)
    assert caught.value.parameter == parameter
