import resource
from pathlib import Path

import pytest
import torch

from tidegate_engine.executor.kv_cache import KvCache, KvCacheError
from tidegate_testing.devices import DEVICES
from tidegate_testing.models import TINY


def test_a_block_is_one_piece_of_memory_over_all_layers() -> None:
    cache = KvCache.allocate(TINY, num_blocks=5, block_size=4)
    block_shape = (TINY.num_layers, 2, 4, TINY.num_kv_heads, TINY.head_size)
    assert cache.pool.shape == (5 + 1, *block_shape)  # one is scratch
    assert cache.pool[3].is_contiguous()
    assert (cache.num_blocks, cache.block_size) == (5, 4)
    assert cache.host_pool.shape == (0, *block_shape)


def test_unused_blocks_take_no_memory() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    cache = KvCache.allocate(TINY, num_blocks=100_000, num_host_blocks=50_000, block_size=16)
    assert cache.pool.nbytes > 400e6
    assert cache.host_pool.nbytes > 200e6
    assert resident_bytes() - before < 40e6
    assert not cache.pool[99_999].any()
    assert not cache.host_pool[49_999].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_a_block_is_known_before_it_is_allocated(dtype: torch.dtype) -> None:
    cache = KvCache.allocate(TINY, num_blocks=1, num_host_blocks=1, block_size=16, dtype=dtype)
    assert KvCache.block_bytes(TINY, 16, dtype) == cache.pool[0].nbytes == cache.host_pool.nbytes


@pytest.mark.parametrize(
    ("sizes", "parameter"),
    [((0, 1, 0), "num_blocks"), ((1, 0, 0), "block_size"), ((1, 1, -1), "num_host_blocks")],
)
def test_a_pool_without_room_is_refused(sizes: tuple[int, int, int], parameter: str) -> None:
    num_blocks, block_size, num_host_blocks = sizes
    with pytest.raises(KvCacheError, match=f"^{parameter} must") as caught:
        KvCache.allocate(
            TINY, num_blocks=num_blocks, block_size=block_size, num_host_blocks=num_host_blocks
        )
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_pool_is_pinned_where_the_pool_is_on_cuda(device: str) -> None:
    cache = KvCache.allocate(TINY, num_blocks=2, num_host_blocks=3, block_size=4, device=device)
    assert cache.pool.device.type == device
    assert cache.host_pool.device.type == "cpu"
    assert cache.host_pool.is_pinned() == cache.host_pool[1:2].is_pinned() == (device == "cuda")
    assert not cache.pool.any()
    assert not cache.host_pool.any()


def test_both_pools_are_of_as_many_bytes_as_their_blocks() -> None:
    cache = KvCache.allocate(
        TINY, num_blocks=7, num_host_blocks=3, block_size=8, dtype=torch.bfloat16
    )
    # Layers, keys and values, tokens, heads, head size, bytes of a bfloat16.
    block = 2 * 2 * 8 * 2 * 8 * 2
    assert KvCache.block_bytes(TINY, 8, torch.bfloat16) == block
    assert cache.pool.nbytes == (7 + 1) * block
    assert cache.host_pool.nbytes == 3 * block
    assert (cache.num_blocks, cache.num_host_blocks, cache.block_size) == (7, 3, 8)


def test_a_pool_that_the_memory_cannot_hold_is_refused_with_its_bytes() -> None:
    block = KvCache.block_bytes(TINY, 16, torch.float32)
    with pytest.raises(KvCacheError, match="num_blocks asks for 1125899906842624 bytes") as caught:
        KvCache.allocate(TINY, num_blocks=(1 << 50) // block - 1, block_size=16)
    assert caught.value.parameter == "num_blocks"
    with pytest.raises(KvCacheError, match="num_host_blocks asks for"):
        KvCache.allocate(TINY, num_blocks=1, num_host_blocks=(1 << 50) // block, block_size=16)
