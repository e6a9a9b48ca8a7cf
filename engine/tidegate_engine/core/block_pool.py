"""KV-block accounting: who holds which physical block, and whose content is still worth keeping.

A KV block holds the keys and values of `block_size` consecutive tokens, for all layers. This
module counts blocks; the tensors belong to the executor. A block is in exactly one state:

    used    one reference or more; its content may be known to the prefix cache by a key
    cached  no reference, content known by a key: counts as free, forgotten oldest first
    free    no reference, no content worth keeping

    allocate: free -> used, or else cached -> used, the content forgotten
    share:    used -> used, cached -> used, the content kept
    release:  used -> used, and with the last reference used -> cached or free

Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, sections 4.2 to 4.4 (block tables, reference counts, sharing); Zheng
et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, section
3 (prefixes nobody holds stay until their memory is needed; the least recently used end goes first).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence


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
    """A fixed set of KV blocks with reference counts, some of them kept for the prefix cache.

    A block with more than one reference, or known by a key, must not be written; seeing to that is
    the caller's (`is_exclusive`).
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        """Start with every block free.

        Args:
            num_blocks: Capacity, in blocks; 0 for a pool that lends nothing.
            block_size: Tokens per block.
        """
        if num_blocks < 0 or block_size < 1:
            raise ValueError(f"a pool can't have {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._num_shared = 0
        # A stack, lowest block on top: what was just freed is reused first, while it is warm, and
        # memory that no block ever needed stays untouched.
        self._free = list(range(num_blocks - 1, -1, -1))
        # With their keys, oldest first. A plain dict keeps this order too, but looks for its first
        # entry past all that were deleted before it, which costs O(n) per block; this one O(1).
        self._cached: OrderedDict[int, bytes] = OrderedDict()
        self._keys: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Of the free blocks, those whose content is kept for the prefix cache."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks that more than one holds."""
        return self._num_shared

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return how many holders a block has."""
        return self._references[block]

    def is_exclusive(self, block: int) -> bool:
        """Say whether a block has exactly one holder, who may write it while it isn't full."""
        return self._references[block] == 1

    def count_freed(self, blocks: Sequence[int], returned: "Counter[int] | None" = None) -> int:
        """Return how many blocks would become free if these references were given back.

        Args:
            blocks: One reference each.
            returned: References that are taken as given back before; these are added to them.
        """
        held = self._references
        if not self._num_shared:
            return len(blocks)
        given = Counter() if returned is None else returned
        freed = 0
        for block in blocks:
            given[block] += 1
            freed += given[block] == held[block]
        return freed

    def allocate(self, count: int) -> list[int]:
        """Hand out blocks to write to, each with one reference.

        Blocks without content go first, then the least recently used cached ones, whose content is
        forgotten.

        Raises:
            OutOfBlocksError: Too few free blocks. The pool is unchanged.
        """
        free = self._free
        available = len(free) + len(self._cached)
        if count > available:
            raise OutOfBlocksError(needed=count, free=available)
        if count == 1:  # A decode that begins a block: the hot path.
            block = free.pop() if free else self._forget_oldest()
            self._references[block] = 1
            return [block]
        blocks = [free.pop() if free else self._forget_oldest() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> int:
        """Give each block one holder more; its content stays.

        Returns:
            How many of them were cached, hence free until now.

        Raises:
            ValueError: A block is free and has no content to share. The pool is unchanged.
        """
        wanted = tuple(blocks)
        references = self._references
        for block in wanted:
            if not references[block] and self._keys[block] is None:
                raise ValueError(f"KV block {block} is free: it has no content to share")
        taken = 0
        for block in wanted:
            if not references[block]:
                del self._cached[block]
                taken += 1
            elif references[block] == 1:
                self._num_shared += 1
            references[block] += 1
        return taken

    def release(self, blocks: Sequence[int]) -> int:
        """Take one reference from each block; the last one frees it.

        A freed block that is known by a key becomes the most recently used cached one. The last
        block goes first, so that the end of a prefix is forgotten before its beginning, without
        which it could not be found.

        Returns:
            How many became free.

        Raises:
            ValueError: A block has fewer references than are released. The pool is unchanged.
        """
        self._require_held(blocks)
        references = self._references
        freed = 0
        for block in reversed(blocks):
            references[block] -= 1
            if references[block] == 1:
                self._num_shared -= 1
            elif not references[block]:
                freed += 1
                key = self._keys[block]
                if key is None:
                    self._free.append(block)
                else:
                    self._cached[block] = key
        return freed

    def register(self, block: int, key: bytes) -> None:
        """Know the content of a full block by a key from now on.

        When another block has the key already, that one stays and this one isn't registered: the
        two are equal, and requests may share the first already.

        Raises:
            ValueError: Nobody holds the block, or it has another key. The pool is unchanged.
        """
        known = self._keys[block]
        if known == key:
            return
        if known is not None:
            raise ValueError(f"KV block {block} is registered under another key")
        if not self._references[block]:
            raise ValueError(f"KV block {block} is free: it has no content to register")
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def unregister(self, blocks: Iterable[int]) -> None:
        """Know held blocks by no key any more: their content is not what the keys say."""
        for block in blocks:
            key = self._keys[block]
            if key is not None:
                self._keys[block] = None
                del self._blocks[key]

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest leading run of keys that are all registered.

        No key behind the first that isn't is looked at.

        No reference is taken: share the blocks before anything else is allocated.
        """
        blocks = []
        find = self._blocks.get
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def check_invariants(self, references: Mapping[int, int]) -> None:
        """Verify that the pool agrees with its holders and with itself.

        Args:
            references: Holders by block; blocks that nobody holds may be missing.

        Raises:
            AssertionError: A reference count is wrong, a block is in no state or in two, or the
                keys of blocks and the blocks of keys differ.
        """
        self._check_references(references)
        self._check_states()
        self._check_keys()

    def _forget_oldest(self) -> int:
        block, key = self._cached.popitem(last=False)
        self._keys[block] = None
        del self._blocks[key]
        return block

    def _require_held(self, blocks: Sequence[int]) -> None:
        # Two passes at the speed of C for what is always the case; counting is for the rest.
        if all(map(self._references.__getitem__, blocks)) and len(set(blocks)) == len(blocks):
            return
        for block, count in Counter(blocks).items():
            if count > self._references[block]:
                held = self._references[block]
                raise ValueError(
                    f"KV block {block} is released {count} times but held {held} times"
                )

    def _check_references(self, references: Mapping[int, int]) -> None:
        unknown = sorted(block for block in references if not 0 <= block < self.num_blocks)
        if unknown:
            raise AssertionError(f"blocks held that the pool doesn't have: {unknown}")
        for block, count in enumerate(self._references):
            holders = references.get(block, 0)
            if count != holders:
                raise AssertionError(f"block {block} has {count} references and {holders} holders")

    def _check_states(self) -> None:
        places = Counter([*self._free, *self._cached])
        for block, count in enumerate(self._references):
            if places[block] != (count == 0):
                raise AssertionError(
                    f"block {block} with {count} references is free or cached {places[block]} times"
                )
        shared = sum(count > 1 for count in self._references)
        if shared != self._num_shared:
            raise AssertionError(f"{shared} blocks are shared, counted {self._num_shared}")
        used = sum(count > 0 for count in self._references)
        if used + self.num_free != self.num_blocks:
            raise AssertionError(f"{used} used + {self.num_free} free is not {self.num_blocks}")

    def _check_keys(self) -> None:
        for block in self._free:
            if self._keys[block] is not None:
                raise AssertionError(f"free block {block} is registered")
        for block, key in self._cached.items():
            if self._keys[block] != key:
                raise AssertionError(f"cached block {block} is not registered under its key")
        registered = [(known, block) for block, known in enumerate(self._keys) if known is not None]
        if sorted(registered) != sorted(self._blocks.items()):
            raise AssertionError("the keys of blocks and the blocks of keys differ")
