"""Code of our own on the threads that PyTorch's operations run on."""

import ctypes
import os
from collections.abc import Callable

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_SPINS = "10000"
_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def shorten_spinning() -> None:
    """Let threads that wait spin for about half a millisecond; do so before PyTorch is imported.

    GNU's library, which reads the environment as it is loaded, has them spin for 15 ms: it is then
    as long that a step waits, with a core that nobody uses, for a thread whose own core another
    process has taken. Between two kernels of a step a thread waits for less than a tenth of a
    millisecond. Where the environment says how to wait, it stays so.
    """
    if not any(name in os.environ for name in _POLICIES):
        os.environ["GOMP_SPINCOUNT"] = _SPINS


class Team:
    """OpenMP's threads of this process.

    PyTorch's and ours must be the same: a thread that waits for work spins for a while, and two
    teams would take the cores from each other.
    """

    def __init__(self, parallel: Callable[[int, int, int, int], None]) -> None:
        self._parallel = parallel

    @classmethod
    def find(cls) -> "Team | None":
        """Return the team of the OpenMP library that this process has loaded, if one can be used.

        GNU's library is driven through the call that compilers emit for `#pragma omp parallel`;
        Intel's and LLVM's offer it, too.
        """
        try:
            parallel = ctypes.CDLL(None).GOMP_parallel
        except (OSError, TypeError, AttributeError):
            return None
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return cls(parallel)

    def run(self, function: int, argument: int, num_threads: int) -> None:
        """Call C function `void(void *)` in every thread at once; return when all have ended."""
        if num_threads == 1:
            _FUNCTION(function)(argument)
        else:
            self._parallel(function, argument, num_threads, 0)
