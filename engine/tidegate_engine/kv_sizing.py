"""How many KV blocks there are: as many as were asked for, or as many as memory allows."""

from dataclasses import dataclass

from tidegate_engine.settings import variable_of
from tidegate_engine.start_errors import KvMemoryError, size_text

DEVICE_FRACTION = 0.9
"""Share of a GPU's memory for weights and KV pool; activations take the rest."""

HOST_FRACTION = 0.25
"""Share of the available host memory that KV blocks are given by default: on a CPU both pools
together, else the pool of swapped-out requests. Low, as others want memory too, and the prefix
cache in time fills whatever there is."""

_HOST_BLOCKS_PER_BLOCK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """Memory for KV blocks, beside the weights.

    Attributes:
        block_bytes: Of one block.
        device_bytes: For the pool on a device with memory of its own; None = the pool lies in the
            host's memory, as it does on a CPU.
        host_bytes: That the host has at all.
        available_host_bytes: That the host has to spare now.
    """

    block_bytes: int
    device_bytes: int | None
    host_bytes: int
    available_host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvBlocks:
    """Blocks of the pool and of the host's pool."""

    pool: int
    host: int


def size_kv(
    memory: KvMemory, *, num_blocks: int | None, num_host_blocks: int | None, most_blocks: int
) -> KvBlocks:
    """Return the blocks of both pools.

    Args:
        memory: What there is.
        num_blocks: As set; None = what memory allows, on a CPU at most `most_blocks`.
        num_host_blocks: As set; None = half as many as in the pool.
        most_blocks: With so many, all requests that may run have room for the longest context.

    Raises:
        KvMemoryError: They don't fit.
    """
    pool = num_blocks
    if pool is None:
        pool = _fitting_blocks(memory, num_host_blocks, most_blocks)
    host = num_host_blocks
    if host is None:
        host = int(pool * _HOST_BLOCKS_PER_BLOCK)
        if memory.device_bytes is not None:
            host = min(host, _share(memory) // memory.block_bytes)
    blocks = KvBlocks(pool=pool, host=host)
    _check(memory, blocks)
    return blocks


def _share(memory: KvMemory) -> int:
    return int(memory.available_host_bytes * HOST_FRACTION)


def _fitting_blocks(memory: KvMemory, num_host_blocks: int | None, most_blocks: int) -> int:
    if memory.device_bytes is not None:
        room = memory.device_bytes
        fitting = room // memory.block_bytes
    elif num_host_blocks is None:
        room = int(_share(memory) / (1 + _HOST_BLOCKS_PER_BLOCK))
        fitting = min(most_blocks, room // memory.block_bytes)
    else:
        room = _share(memory) - num_host_blocks * memory.block_bytes
        fitting = min(most_blocks, room // memory.block_bytes)
    if fitting < 1:
        raise KvMemoryError(
            variable_of("kv_blocks"),
            "auto finds no room: the bytes of a single block",
            needed_bytes=memory.block_bytes,
            limit_bytes=max(0, room),
        )
    return fitting


def _check(memory: KvMemory, blocks: KvBlocks) -> None:
    """Refuse what can never fit; what others hold at the moment may be gone when it is needed."""
    pool_bytes, host_bytes = blocks.pool * memory.block_bytes, blocks.host * memory.block_bytes
    each = f"blocks of {size_text(memory.block_bytes)}"
    if host_bytes > memory.host_bytes:
        raise KvMemoryError(
            variable_of("host_kv_blocks"),
            f"{blocks.host} {each}",
            needed_bytes=host_bytes,
            limit_bytes=memory.host_bytes,
        )
    needed, limit = pool_bytes, memory.device_bytes
    if limit is None:
        needed, limit = pool_bytes + host_bytes, memory.host_bytes
        each += f", and {blocks.host} more of the host's pool,"
    if needed > limit:
        raise KvMemoryError(
            variable_of("kv_blocks"),
            f"{blocks.pool} {each}",
            needed_bytes=needed,
            limit_bytes=limit,
        )
