"""Copies of KV blocks: on the device before a step, to and from the host beside the steps."""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate_engine.core.plan import BlockCopy, SwapCopy
from tidegate_engine.executor.kv_cache import KvCache
from tidegate_engine.model.llama import CopyBlocks

_Bytes = npt.NDArray[np.uint8]


class KvCopyError(RuntimeError):
    """A swap broke off: what it was to write is undefined.

    Attributes:
        fence: Of the swap.
    """

    def __init__(self, swap: SwapCopy, error: BaseException) -> None:
        problem = f"{type(error).__name__}: {error}"
        super().__init__(f"swap {swap.fence} of request {swap.request_id}: {problem}")
        self.fence = swap.fence


class KvCopies:
    """Moves the blocks of one KV cache; swaps run beside whatever the caller does meanwhile.

    On CUDA each direction has a stream of its own, since the bus carries both at once. On a CPU one
    thread copies for both, as they share the memory's bandwidth; it ends once nobody holds this
    object or when the process ends, after what was begun.
    """

    def __init__(self, cache: KvCache, copy_blocks: CopyBlocks = np.copyto) -> None:
        """Nothing is on its way yet.

        Args:
            cache: Whose blocks are moved.
            copy_blocks: Copies them on a CPU.
        """
        self._cache = cache
        device = cache.pool.device
        if device.type == "cuda":
            self._outward: _Lane = _StreamLane(device)
            self._inward: _Lane = _StreamLane(device)
        else:
            self._outward = self._inward = _ThreadLane(copy_blocks)
        self._flights: list[_Flight] = []

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks on the device; all are read before any is written."""
        if not copies:
            return
        pairs = torch.tensor(copies, device=self._cache.pool.device)
        content = self._cache.pool.index_select(0, pairs[:, 0])
        self._cache.pool.index_copy_(0, pairs[:, 1], content)

    def swap_out(self, swap: SwapCopy) -> None:
        """Begin to copy device blocks to the host."""
        pieces = [(host, device) for device, host in _pieces(self._cache, swap)]
        self._flights.append(_Flight(swap, self._outward.begin(pieces)))

    def swap_in(self, swap: SwapCopy) -> None:
        """Begin to copy host blocks to the device."""
        pieces = [*_pieces(self._cache, swap)]
        self._flights.append(_Flight(swap, self._inward.begin(pieces)))

    def pass_fences(self, *, must_wait: bool = False) -> tuple[int, ...]:
        """Return the swaps found complete, each once; wait for the oldest if there is no other.

        Raises:
            KvCopyError: A swap broke off. None has passed then, and so it will be until that one
                is ended.
        """
        ended = [flight for flight in self._flights if flight.copying.done()]
        if must_wait and not ended:
            ended = self._flights[:1]
        for flight in ended:
            error = flight.copying.exception()
            if error is not None:
                raise KvCopyError(flight.swap, error) from error
        self._flights = [flight for flight in self._flights if flight not in ended]
        return tuple(flight.swap.fence for flight in ended)

    def end(self, fences: Collection[int]) -> None:
        """Forget swaps, complete or not, as soon as they touch no block any more."""
        for flight in [flight for flight in self._flights if flight.swap.fence in fences]:
            flight.copying.exception()
            self._flights.remove(flight)


class _Copying(Protocol):
    """A copy that was begun, with the words of a `Future`."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def exception(self) -> BaseException | None:
        """Wait for its end; return what it broke off with."""
        ...


class _Lane(Protocol):
    """Copies one thing after the other, beside the caller."""

    def begin(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> _Copying:
        """Begin to copy to targets from sources, behind what the caller has done with either."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A swap on its way."""

    swap: SwapCopy
    copying: _Copying


def _pieces(cache: KvCache, swap: SwapCopy) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what belongs together on the device and on the host, in as few pieces as there are.

    Blocks that follow each other on both sides are one piece: for small ones a call costs more
    than the copy.
    """
    pairs = enumerate(zip(swap.device_blocks, swap.host_blocks, strict=True))
    for _, run in groupby(pairs, key=lambda pair: (pair[1][0] - pair[0], pair[1][1] - pair[0])):
        blocks = [pair for _, pair in run]
        (device, host), count = blocks[0], len(blocks)
        yield cache.pool[device : device + count], cache.host_pool[host : host + count]


# -- CPU -------------------------------------------------------------------------------------------


class _ThreadLane:
    """A thread that copies."""

    def __init__(self, copy_blocks: CopyBlocks) -> None:
        self._copy_blocks = copy_blocks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copies")

    def begin(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> "Future[None]":
        # Not by PyTorch, which would divide it among as many threads as a step has; these would be
        # further ones that want the same cores.
        arrays = [(_as_bytes(target), _as_bytes(source)) for target, source in pieces]
        return self._thread.submit(_copy, arrays, self._copy_blocks)


def _as_bytes(blocks: Tensor) -> _Bytes:
    array: _Bytes = blocks.view(torch.uint8).numpy().reshape(-1)  # NumPy doesn't know bfloat16
    return array


def _copy(pieces: Sequence[tuple[_Bytes, _Bytes]], copy_blocks: CopyBlocks) -> None:
    for target, source in pieces:
        copy_blocks(target, source)


# -- CUDA ------------------------------------------------------------------------------------------


class _StreamLane:
    """A stream that copies between pinned memory and the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, pieces: Sequence[tuple[Tensor, Tensor]]) -> "_EventCopying":
        # Behind what earlier steps still do with these blocks: a step that samples nothing has
        # not been waited for.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        # Each piece is contiguous: between pinned memory and the device only such copies are
        # asynchronous.
        with torch.cuda.stream(self._stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return _EventCopying(done)


class _EventCopying:
    """An event behind a copy in its stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def exception(self) -> BaseException | None:
        try:
            self._event.synchronize()
        except RuntimeError as error:  # of anything on the device
            return error
        return None
