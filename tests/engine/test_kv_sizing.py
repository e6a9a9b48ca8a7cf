import pytest

from tidegate_engine.kv_sizing import KvBlocks, KvMemory, size_kv
from tidegate_engine.start_errors import KvMemoryError

MIB = 1 << 20
CPU = KvMemory(
    block_bytes=MIB,
    device_bytes=None,
    host_bytes=10_000 * MIB,
    available_host_bytes=6000 * MIB,
)
GPU = KvMemory(
    block_bytes=MIB,
    device_bytes=50_000 * MIB,
    host_bytes=10_000 * MIB,
    available_host_bytes=6000 * MIB,
)
MANY = 1 << 40


def test_on_a_cpu_both_pools_share_a_quarter_of_what_is_free() -> None:
    blocks = size_kv(CPU, num_blocks=None, num_host_blocks=None, most_blocks=MANY)
    assert blocks == KvBlocks(pool=1000, host=500)


def test_no_more_blocks_are_taken_than_requests_could_fill() -> None:
    blocks = size_kv(CPU, num_blocks=None, num_host_blocks=None, most_blocks=64)
    assert blocks == KvBlocks(pool=64, host=32)


def test_the_pool_gets_what_the_given_host_blocks_leave() -> None:
    for host in (0, 300):
        blocks = size_kv(CPU, num_blocks=None, num_host_blocks=host, most_blocks=MANY)
        assert blocks == KvBlocks(pool=1500 - host, host=host)


def test_on_a_gpu_the_pool_fills_it_and_the_host_gives_a_quarter_at_most() -> None:
    blocks = size_kv(GPU, num_blocks=None, num_host_blocks=None, most_blocks=1)
    assert blocks == KvBlocks(pool=50_000, host=1500)
    blocks = size_kv(GPU, num_blocks=100, num_host_blocks=None, most_blocks=1)
    assert blocks == KvBlocks(pool=100, host=50)


def test_what_is_asked_for_is_given_as_long_as_memory_can_ever_hold_it() -> None:
    blocks = size_kv(CPU, num_blocks=9000, num_host_blocks=1000, most_blocks=1)
    assert blocks == KvBlocks(pool=9000, host=1000)
    with pytest.raises(KvMemoryError, match=r"^TIDEGATE_KV_BLOCKS: 9000 blocks of 1 MiB") as caught:
        size_kv(CPU, num_blocks=9000, num_host_blocks=1001, most_blocks=1)
    assert caught.value.variable == "TIDEGATE_KV_BLOCKS"
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (10_001 * MIB, 10_000 * MIB)


@pytest.mark.parametrize("memory", [CPU, GPU])
def test_host_blocks_larger_than_the_host_are_refused_by_their_own_name(memory: KvMemory) -> None:
    with pytest.raises(KvMemoryError, match=r"^TIDEGATE_HOST_KV_BLOCKS: 10001 blocks of 1 MiB"):
        size_kv(memory, num_blocks=1, num_host_blocks=10_001, most_blocks=1)


def test_a_pool_larger_than_its_gpu_is_refused() -> None:
    with pytest.raises(KvMemoryError, match=r"50001 blocks of 1 MiB take 48\.8 GiB, but 48\.8 GiB"):
        size_kv(GPU, num_blocks=50_001, num_host_blocks=0, most_blocks=1)


def test_no_room_for_a_single_block_is_told() -> None:
    full = KvMemory(block_bytes=MIB, device_bytes=0, host_bytes=MIB, available_host_bytes=MIB)
    with pytest.raises(KvMemoryError, match="TIDEGATE_KV_BLOCKS: auto finds no room"):
        size_kv(full, num_blocks=None, num_host_blocks=None, most_blocks=MANY)
    with pytest.raises(KvMemoryError, match="TIDEGATE_KV_BLOCKS: auto finds no room"):
        size_kv(CPU, num_blocks=None, num_host_blocks=1500, most_blocks=MANY)
