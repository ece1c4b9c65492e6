"""Rendezvous hashing: a key puts the replicas in an order of its own, the same in every process. Without one replica,
the order of the others stays the same.
"""

import hashlib
from functools import lru_cache

_MASK = (1 << 64) - 1


@lru_cache(maxsize=1 << 14)
def _seed(replica_id: str) -> int:
    return _hash(replica_id) | 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Key:
    """What is to stay on one replica."""

    __slots__ = ("_hash",)

    def __init__(self, *parts: str) -> None:
        self._hash = _hash("\0".join(parts))

    def score(self, replica_id: str) -> float:
        """The replica's place in this key's order, from 0 to 1; the lowest comes first."""
        # A product of two hashes costs a tenth of a hash of both, and its upper bits are as even.
        return (self._hash * _seed(replica_id) & _MASK) / _MASK
