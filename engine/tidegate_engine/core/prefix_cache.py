"""What a full KV block is known by: a key over its tokens and all tokens before them.

The keys and values of a token depend on every token before it, so equal tokens make equal
blocks only behind equal prefixes. Chaining says just that: a block's key is the SHA-256 of the
previous block's key and of its own tokens, the first block's that of its tenant's root key and its
tokens. One key then stands for a whole prefix, costs the hashing of one block, and leads to no
block of another tenant, whatever tokens are sent, unless both share their prefixes: then they have
one root. SHA-256, because clients choose the tokens: who can make two prefixes collide would be
answered from the wrong one.

The block size needs no place in the key: it is one per pool, and blocks of different sizes hash
texts of different lengths.

Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.4 (shared prefix); the design page "Automatic Prefix
Caching" of vLLM (a hash of parent and tokens in place of a tree of prefixes).
"""

import hashlib
import struct
from collections.abc import Sequence

_ROOT = b"tidegate prefix cache of tenant "
_COMMON_ROOT = b"tidegate prefix cache in common "


def root_key(tenant: str) -> bytes:
    """Return what a tenant's chains begin with: no tenant finds another's blocks.

    Args:
        tenant: As the identity check found it; never what a client says of itself.
    """
    return hashlib.sha256(_ROOT + tenant.encode()).digest()


def common_root_key(number: int) -> bytes:
    """Return what the chains of all tenants that share begin with.

    Args:
        number: Of the root: with another one, nothing is found that was known before.
    """
    return hashlib.sha256(_COMMON_ROOT + str(number).encode()).digest()


class BlockKeys:
    """The keys of one token sequence's full blocks, computed when first asked for.

    The sequence may grow between calls; tokens once given must not change.

    Attributes:
        root: What the chain begins with.
        is_common: Whether several tenants have this root.
    """

    # Every waiting request has one.
    __slots__ = ("_block_size", "_keys", "_last", "is_common", "root")

    def __init__(self, root: bytes, block_size: int, *, is_common: bool = False) -> None:
        """Start a chain.

        Args:
            root: Of the tenant that the tokens belong to.
            block_size: Tokens per block.
            is_common: Whether several tenants have this root.
        """
        self.root = root
        self.is_common = is_common
        self._last = root
        self._block_size = block_size
        self._keys: list[bytes] = []

    def upto(self, token_ids: Sequence[int], num_blocks: int, *, start: int = 0) -> Sequence[bytes]:
        """Return the keys of the first `num_blocks` blocks, or of those from `start` on.

        Args:
            token_ids: The sequence from its beginning, every one below 2**32.
            num_blocks: At most as many as `token_ids` fills.
            start: The first block wanted; who registers block after block saves the copy of all.

        Raises:
            ValueError: The tokens don't fill so many blocks. Nothing was computed.
        """
        if num_blocks > len(self._keys):
            self._extend(token_ids, num_blocks)
        return self._keys[start:num_blocks]

    def _extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        size = self._block_size
        if num_blocks * size > len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens don't fill {num_blocks} blocks of {size}")
        # Fixed width: no other run of token ids has the same bytes. Little-endian: the same keys on
        # every machine.
        encoding = f"<{size}I"
        for start in range(len(self._keys) * size, num_blocks * size, size):
            tokens = struct.pack(encoding, *token_ids[start : start + size])
            self._last = hashlib.sha256(self._last + tokens).digest()
            self._keys.append(self._last)
