"""KV-block accounting: which physical blocks are free and which are in a block table.

A KV block holds the keys and values of `block_size` consecutive tokens of one request, for all
layers. This module counts blocks; the tensors belong to the executor.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.
"""

from collections import deque
from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """More blocks were wanted than are free; the caller should have asked first.

    Attributes:
        needed: Blocks asked for.
        free: Blocks there were.
    """

    def __init__(self, *, needed: int, free: int) -> None:
        super().__init__(f"needed {needed} KV blocks, {free} free")
        self.needed = needed
        self.free = free


class BlockPool:
    """A fixed set of KV blocks, handed out to block tables and taken back whole.

    Invariant: every block is either free or in exactly one block table (`check_invariants`).
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        """Start with every block free.

        Args:
            num_blocks: Capacity, in blocks.
            block_size: Tokens per block.
        """
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks in no block table."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks in a block table."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def grow(self, block_table: list[int], *, num_tokens: int) -> int:
        """Extend a block table to cover `num_tokens`.

        Returns:
            The number of blocks added.

        Raises:
            OutOfBlocksError: Too few free blocks. The pool and the table are unchanged.
        """
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > len(self._free):
            raise OutOfBlocksError(needed=missing, free=len(self._free))
        block_table.extend(self._free.popleft() for _ in range(missing))
        return max(0, missing)

    def release(self, block_table: list[int]) -> int:
        """Take back a whole block table; the content of its blocks is lost.

        Returns:
            The number of blocks freed.
        """
        freed = len(block_table)
        self._free.extend(block_table)
        block_table.clear()
        return freed

    def check_invariants(self, block_tables: Iterable[list[int]]) -> None:
        """Verify that the free blocks and all block tables partition the pool.

        Raises:
            AssertionError: A block is lost, shared, or both free and in a table.
        """
        accounted = sorted([*self._free, *(block for table in block_tables for block in table)])
        if accounted != list(range(self.num_blocks)):
            raise AssertionError(f"blocks do not partition the pool: {accounted}")
