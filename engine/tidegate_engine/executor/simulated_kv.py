"""KV blocks that hold fingerprints instead of keys and values.

Every token leaves a fingerprint in its place, chained to that of the token before it, as a model's
keys and values depend on all that was before. So a full block's last one stands for the block.
Fingerprints are hashes of tuples of integers, which Python computes alike in every process.
"""

from collections.abc import Sequence

from tidegate_engine.core.plan import PlanRow

Content = tuple[int, ...]
"""A block's fingerprints, one for each of its tokens."""

_VOID = 0
_MAX_PREFIXES = 4096


class _Prefix:
    """What a request's first blocks were found to hold, for as long as they hold it.

    Attributes:
        table: The request's block table when it was last read.
        num_blocks: How many of its blocks are in the digest.
        digest: Of their fingerprints, in this order.
    """

    __slots__ = ("digest", "num_blocks", "table")

    def __init__(self, table: list[int]) -> None:
        self.table = table
        self.num_blocks = 0
        self.digest = 0


class SimulatedKv:
    """The blocks of a simulated device.

    Decodes read the same blocks step after step. So a digest of a request's full blocks is kept,
    and forgotten as soon as one of them changes: what is read is always what is there.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        # By offset in the block, then by block.
        self._fingerprints = [[_VOID] * num_blocks for _ in range(block_size)]
        self._last = self._fingerprints[-1]
        self._prefixes: dict[str, _Prefix] = {}
        # By block, whose prefixes it is in; maybe some that have been forgotten.
        self._readers: dict[int, set[str]] = {}

    def write(self, row: PlanRow) -> None:
        """Store a row's tokens.

        Raises:
            IndexError: The row names a block that there isn't.
        """
        columns, block_ids, position = self._fingerprints, row.block_ids, row.start
        size = len(columns)
        index, offset = divmod(position, size)
        before = columns[offset - 1][block_ids[index if offset else index - 1]] if position else 0
        block, has_changed = 0, False
        for token in row.token_ids:
            before = hash((before, position, token))
            block = block_ids[index]
            has_changed = columns[offset][block] != before
            columns[offset][block] = before
            position += 1
            offset += 1
            if offset == size:
                if has_changed:
                    self._forget_readers(block)
                index, offset = index + 1, 0
        if offset and has_changed:
            self._void(block, offset)

    def read(self, row: PlanRow) -> int:
        """Return a digest of everything up to the row's last token.

        Raises:
            IndexError: The row names a block that there isn't.
        """
        block_ids = row.block_ids
        num_full, offset = divmod(row.start + len(row.token_ids), len(self._fingerprints))
        prefix = self._prefix(row.request_id, block_ids, num_full)
        if not offset:
            return prefix.digest
        return hash((prefix.digest, self._fingerprints[offset - 1][block_ids[num_full]]))

    def content(self, block: int) -> Content:
        """Return what a block holds."""
        return tuple([column[block] for column in self._fingerprints])

    def put(self, block: int, content: Content) -> None:
        """Overwrite a block."""
        for column, fingerprint in zip(self._fingerprints, content, strict=True):
            column[block] = fingerprint
        self._forget_readers(block)

    def _prefix(self, request_id: str, block_ids: Sequence[int], num_blocks: int) -> _Prefix:
        prefix = self._prefixes.get(request_id)
        # Tables rarely grow, and comparing equal ones whole is several times faster than in part.
        if prefix is None or prefix.table != block_ids or prefix.num_blocks > num_blocks:
            prefix = self._continued(request_id, prefix, [*block_ids], num_blocks)
        for block in block_ids[prefix.num_blocks : num_blocks]:
            prefix.digest = hash((prefix.digest, self._last[block]))
            self._readers.setdefault(block, set()).add(request_id)
        prefix.num_blocks = num_blocks
        return prefix

    def _continued(
        self, request_id: str, prefix: _Prefix | None, table: list[int], num_blocks: int
    ) -> _Prefix:
        """Return a prefix that holds for `table`: the one there is, or one of no blocks yet."""
        known = prefix.num_blocks if prefix else 0
        if prefix and known <= num_blocks and prefix.table[:known] == table[:known]:
            prefix.table = table
            return prefix
        # Those of requests that have ended remain until here.
        if len(self._prefixes) >= _MAX_PREFIXES:
            self._prefixes.clear()
            self._readers.clear()
        prefix = self._prefixes[request_id] = _Prefix(table)
        return prefix

    def _void(self, block: int, offset: int) -> None:
        """Take away what is in a block from an offset on: it followed upon another token."""
        if self._fingerprints[offset][block] != _VOID:
            for column in self._fingerprints[offset:]:
                column[block] = _VOID
            self._forget_readers(block)

    def _forget_readers(self, block: int) -> None:
        for request_id in self._readers.pop(block, ()):
            self._prefixes.pop(request_id, None)
