"""The CPU's copy of KV blocks: past the caches, of which the steps beside it have better use.

What is written by way of the caches is read into them first, which is a third of all that a copy
moves. The system's memcpy leaves them out only for copies that are larger than most of a cache,
and where many machines share one cache, that is more than a request's KV.
"""

# ruff: noqa: ANN401
# Numba's values have no types in Python.

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate_engine.model.simd import LANES, finish_streams, load, stream

Bytes = npt.NDArray[np.uint8]

_VECTOR_BYTES = 4 * LANES


def copy_bytes(arguments: Any) -> None:
    """Copy memory.

    Arguments: addresses of the target and of the source, number of bytes; the first and the last
    are multiples of 64.
    """
    target, source, size = arguments[0], arguments[1], arguments[2]
    for at in range(0, size, _VECTOR_BYTES):
        stream(target + at, load(source + at))
    finish_streams()


class StreamingCopy:
    """Copies as `numpy.copyto` does, without a lock."""

    def __init__(self, address: int, owner: object) -> None:
        """Use a compiled `copy_bytes`.

        Args:
            address: Of the C function.
            owner: Keeps that in memory.
        """
        self._owner = owner
        self._copy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def __call__(self, target: Bytes, source: Bytes) -> None:
        """Copy contiguous bytes [n] to others [n] that don't overlap."""
        head = min(-target.ctypes.data % _VECTOR_BYTES, target.nbytes)
        size = (target.nbytes - head) // _VECTOR_BYTES * _VECTOR_BYTES
        for edge in (slice(head), slice(head + size, None)):
            np.copyto(target[edge], source[edge])
        addresses = target.ctypes.data + head, source.ctypes.data + head
        arguments = (ctypes.c_int64 * 3)(*addresses, size)
        self._copy(ctypes.addressof(arguments))
