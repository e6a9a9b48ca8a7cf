import gc
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tidegate_engine.core.plan import BlockCopy, SwapCopy
from tidegate_engine.executor import kv_copies
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.executor.kv_copies import KvCopies, KvCopyError
from tidegate_engine.model.cpu_copy import StreamingCopy, copy_bytes
from tidegate_engine.model.cpu_kernels import KernelCompiler
from tidegate_engine.model.llama import CopyBlocks
from tidegate_testing.cluster import eventually
from tidegate_testing.devices import DEVICES
from tidegate_testing.models import TINY

DEVICE_BLOCKS = (3, 4, 5, 11, 10, 0, 7, 8)
HOST_BLOCKS = (6, 7, 8, 0, 1, 2, 9, 11)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memcpy", "past the caches"])
def copy_blocks(request: pytest.FixtureRequest) -> CopyBlocks:
    if request.param == "memcpy":
        return np.copyto
    compiler = KernelCompiler(None)
    return StreamingCopy(compiler.compile(copy_bytes), compiler)


class HeldCopy(NamedTuple):
    begun: threading.Event
    released: threading.Event


@pytest.fixture
def held_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldCopy]:
    """Hold every swap on a CPU until it is released."""
    held = HeldCopy(threading.Event(), threading.Event())
    copy = kv_copies._copy

    def held_back(*arguments: Any) -> None:
        held.begun.set()
        held.released.wait()
        copy(*arguments)

    monkeypatch.setattr(kv_copies, "_copy", held_back)
    yield held
    held.released.set()


def a_cache(device: str = "cpu", dtype: torch.dtype = torch.float32) -> KvCache:
    """Build a cache whose every block has content of its own, scratch and host blocks too."""
    cache = KvCache.allocate(
        TINY, num_blocks=12, num_host_blocks=12, block_size=4, dtype=dtype, device=device
    )
    shape = (-1, 1, 1, 1, 1, 1)
    cache.pool.copy_((torch.arange(13.0) + 1).view(shape))
    cache.host_pool.copy_((torch.arange(12.0) + 101).view(shape))
    return cache


def a_swap(
    fence: int = 1, device: tuple[int, ...] = (3,), host: tuple[int, ...] = (6,)
) -> SwapCopy:
    return SwapCopy(fence, "r", device, host)


def contents(pool: torch.Tensor) -> list[float]:
    """Return what each block is full of."""
    flat = pool.float().cpu().flatten(1)
    assert (flat == flat[:, :1]).all()
    return flat[:, 0].tolist()


def copy_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-copies")]


@EACH_DTYPE
def test_a_swap_out_writes_its_host_blocks_and_nothing_else(
    device: str, dtype: torch.dtype, copy_blocks: CopyBlocks
) -> None:
    cache = a_cache(device, dtype)
    copies = KvCopies(cache, copy_blocks)
    expected = contents(cache.host_pool)
    for source, target in zip(DEVICE_BLOCKS, HOST_BLOCKS, strict=True):
        expected[target] = source + 1.0
    before = contents(cache.pool)
    copies.swap_out(a_swap(1, DEVICE_BLOCKS, HOST_BLOCKS))
    assert copies.pass_fences(must_wait=True) == (1,)
    assert contents(cache.host_pool) == expected
    assert contents(cache.pool) == before


@EACH_DTYPE
def test_a_swap_in_writes_its_device_blocks_and_nothing_else(
    device: str, dtype: torch.dtype, copy_blocks: CopyBlocks
) -> None:
    cache = a_cache(device, dtype)
    copies = KvCopies(cache, copy_blocks)
    expected = contents(cache.pool)
    for target, source in zip(DEVICE_BLOCKS, HOST_BLOCKS, strict=True):
        expected[target] = source + 101.0
    before = contents(cache.host_pool)
    copies.swap_in(a_swap(1, DEVICE_BLOCKS, HOST_BLOCKS))
    assert copies.pass_fences(must_wait=True) == (1,)
    assert contents(cache.pool) == expected
    assert contents(cache.host_pool) == before


def test_a_swap_reads_what_was_computed_before_it(device: str) -> None:
    cache = a_cache(device)
    copies = KvCopies(cache)
    cache.pool[3].fill_(77.0)
    copies.swap_out(a_swap())
    copies.pass_fences(must_wait=True)
    assert contents(cache.host_pool)[6] == 77.0


def test_copies_on_write_read_all_sources_before_any_is_written(device: str) -> None:
    cache = a_cache(device)
    copies = KvCopies(cache)
    copies.copy([BlockCopy(3, 4), BlockCopy(4, 5)])
    copies.copy([])
    assert contents(cache.pool)[3:6] == [4.0, 4.0, 5.0]


def test_each_fence_passes_once_also_when_all_are_awaited_one_by_one(device: str) -> None:
    copies = KvCopies(a_cache(device))
    for fence in range(1, 7):
        swap = a_swap(fence, (fence,), (fence,))
        (copies.swap_out if fence % 2 else copies.swap_in)(swap)
    passed: list[int] = []
    while len(passed) < 6:
        now = copies.pass_fences(must_wait=True)
        assert now
        passed += now
    assert sorted(passed) == [1, 2, 3, 4, 5, 6]
    assert copies.pass_fences(must_wait=True) == ()


def test_blocks_that_follow_each_other_on_both_sides_are_one_piece() -> None:
    cache = a_cache()
    pieces = [*kv_copies._pieces(cache, a_swap(1, DEVICE_BLOCKS, HOST_BLOCKS))]
    assert [len(device) for device, _ in pieces] == [3, 1, 1, 1, 1, 1]
    assert [len(host) for _, host in pieces] == [3, 1, 1, 1, 1, 1]
    assert [contents(device)[0] - 1 for device, _ in pieces] == [3, 11, 10, 0, 7, 8]


def test_the_caller_goes_on_while_a_swap_is_copied_on_a_cpu(held_copy: HeldCopy) -> None:
    cache = a_cache()
    copies = KvCopies(cache)
    copies.swap_out(a_swap())
    held_copy.begun.wait()
    cache.pool[8].fill_(5.0)  # a step beside it
    assert copies.pass_fences() == ()
    held_copy.released.set()
    assert copies.pass_fences(must_wait=True) == (1,)
    assert contents(cache.host_pool)[6] == 4.0


def test_a_swap_that_is_ended_touches_its_blocks_no_more_and_passes_no_fence(
    held_copy: HeldCopy,
) -> None:
    cache = a_cache()
    copies = KvCopies(cache)
    copies.swap_in(a_swap(1))
    copies.swap_in(a_swap(2, (5,), (2,)))
    ending = threading.Thread(target=copies.end, args=([1, 9],))
    ending.start()
    held_copy.begun.wait()
    assert ending.is_alive()
    held_copy.released.set()
    ending.join()
    assert contents(cache.pool)[3] == 107.0
    assert copies.pass_fences(must_wait=True) == (2,)


def test_a_swap_that_breaks_off_is_told_each_time_until_it_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def break_off(*_: object) -> None:
        raise MemoryError("no page left")

    copies = KvCopies(a_cache())
    copies.swap_out(a_swap(1, (1,), (1,)))
    copies.pass_fences(must_wait=True)
    monkeypatch.setattr(kv_copies, "_copy", break_off)
    copies.swap_out(a_swap(2))
    for _ in range(2):
        with pytest.raises(KvCopyError, match="swap 2 of request r: MemoryError: no page") as told:
            copies.pass_fences(must_wait=True)
        assert told.value.fence == 2
    copies.end([2])
    monkeypatch.undo()
    copies.swap_out(a_swap(3))
    assert copies.pass_fences(must_wait=True) == (3,)


def test_the_thread_begins_with_the_first_swap_and_ends_with_its_owner() -> None:
    gc.collect()
    eventually(lambda: not copy_threads(), "the threads of others to end")
    copies = KvCopies(a_cache())
    assert not copy_threads()
    copies.swap_out(a_swap())
    copies.swap_in(a_swap(2, (4,), (1,)))
    assert len(copy_threads()) == 1
    del copies
    eventually(lambda: not copy_threads(), "the thread to end")
