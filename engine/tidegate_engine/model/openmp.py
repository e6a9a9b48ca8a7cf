"""Code of our own on the threads that PyTorch's operations run on."""

import ctypes
from collections.abc import Callable

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


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
