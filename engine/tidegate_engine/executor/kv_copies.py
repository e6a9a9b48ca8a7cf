"""Copies of KV blocks: on the device before a step, to and from the host beside the steps."""

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate_engine.core.plan import BlockCopy, SwapCopy
from tidegate_engine.executor.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class _Flight:
    """A swap on its way; `done` is recorded behind it in its stream."""

    fence: int
    done: torch.cuda.Event


class KvCopies:
    """Moves the blocks of one KV cache.

    On CUDA each direction has a stream of its own, since the bus carries both at once; a swap's
    event behind its last block is its fence. On a CPU a swap is complete when it has begun.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        is_cuda = cache.pool.device.type == "cuda"
        self._out_stream = _new_stream(cache.pool.device) if is_cuda else None
        self._in_stream = _new_stream(cache.pool.device) if is_cuda else None
        self._flights: deque[_Flight] = deque()
        self._complete: list[int] = []

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks on the device; all are read before any is written."""
        if not copies:
            return
        pairs = torch.tensor(copies, device=self._cache.pool.device)
        content = self._cache.pool.index_select(0, pairs[:, 0])
        self._cache.pool.index_copy_(0, pairs[:, 1], content)

    def swap_out(self, swap: SwapCopy) -> None:
        """Begin to copy device blocks to the host."""
        pairs = zip(swap.host_blocks, swap.device_blocks, strict=True)
        host, device = self._cache.host_pool, self._cache.pool
        self._begin(swap, self._out_stream, ((host[h], device[d]) for h, d in pairs))

    def swap_in(self, swap: SwapCopy) -> None:
        """Begin to copy host blocks to the device."""
        pairs = zip(swap.host_blocks, swap.device_blocks, strict=True)
        host, device = self._cache.host_pool, self._cache.pool
        self._begin(swap, self._in_stream, ((device[d], host[h]) for h, d in pairs))

    def pass_fences(self, *, must_wait: bool = False) -> tuple[int, ...]:
        """Return the swaps found complete, each once; wait for the oldest if there is no other."""
        if must_wait and not self._complete and self._flights:
            self._flights[0].done.synchronize()
        in_flight: deque[_Flight] = deque()
        for flight in self._flights:
            if flight.done.query():  # type: ignore[no-untyped-call]
                self._complete.append(flight.fence)
            else:
                in_flight.append(flight)
        self._flights = in_flight
        passed = tuple(self._complete)
        self._complete.clear()
        return passed

    def _begin(
        self,
        swap: SwapCopy,
        stream: torch.cuda.Stream | None,
        blocks: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        # One copy a block: each is contiguous, and copies between pinned memory and the device can
        # be asynchronous only so.
        if stream is not None:
            # Behind what earlier steps still do with these blocks.
            stream.wait_stream(torch.cuda.current_stream(self._cache.pool.device))
        with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
            for target, source in blocks:
                target.copy_(source, non_blocking=True)
            if stream is None:
                self._complete.append(swap.fence)
                return
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        self._flights.append(_Flight(swap.fence, done))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
