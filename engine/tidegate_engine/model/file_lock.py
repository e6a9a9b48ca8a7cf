"""One process at a time, among those that share a directory."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until nobody else holds the lock, and hold it; its directory is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Freed by the kernel when the holder dies, so that a lock never outlives its process.
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
