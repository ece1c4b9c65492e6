"""The blocks of the KV cache: which sequences hold them, and which hold a prefix that can be reused.

A block covers `block_size` tokens of one sequence, in every layer. A full block can be published under the hash of its
whole prefix. Later requests with the same prefix and salt (what K and V depend on beside the tokens, such as the
adapter's digest) share it. Published blocks without a holder stay until their memory is needed, least recently used
first.

Chained prefix hashes as in vLLM's automatic prefix caching (Kwon et al., SOSP 2023, and its v1 design notes).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

TRASH_BLOCK = 0
"""Padding rows write here; it is never handed out."""


def prefix_hash(parent: bytes, token_ids: Sequence[int], salt: str = "") -> bytes:
    """Hash of a block given the hash of all before it. The chain starts from `salt_hash`. `salt`: whatever K and V of
    the block depend on beside its tokens.
    """
    digest = blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    digest.update(salt.encode())
    return digest.digest()


def salt_hash(salt: str) -> bytes:
    """The start of a chain. The salt keeps prefixes of different adapters apart, since K and V depend on them."""
    return blake2b(salt.encode(), digest_size=16).digest()


class BlockPool:
    """Hands out block ids 1 … `num_blocks` - 1. Not thread-safe: the engine loop owns it.

    Invariant: every block but the trash block is in exactly one of: held (`_holders` > 0), `_free`, `_idle`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2, not {num_blocks!r}.")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, TRASH_BLOCK, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, including published ones without a holder."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Published blocks without a holder."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks held by the caller. None, and nothing is taken, when there are fewer."""
        if count > self.num_free:
            return None
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._holders[block] = 1
        return block

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of published blocks for these prefix hashes, each held once more for the caller."""
        found = []
        for key in hashes:
            block = self._block_of.get(key)
            if block is None:
                break
            self._idle.pop(block, None)
            self._holders[block] += 1
            found.append(block)
        return found

    def publish(self, block: int, key: bytes) -> None:
        """Offer a held, full block under its prefix hash. The first block under a hash keeps it."""
        if key not in self._block_of and block not in self._hash_of:
            self._block_of[key] = block
            self._hash_of[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. The tail of a sequence goes first, so that shorter prefixes outlive longer ones."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released twice"
            if self._holders[block]:
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._free.append(block)
