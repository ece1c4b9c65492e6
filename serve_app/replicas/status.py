"""What a replica tells the ingresses about itself: its progress, its adapters and its load.

An adapter is told by 8 bytes of its digest's hash. They are sorted, so the order in which adapters are used changes
nothing.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

STATUS_GAP_S = 0.05
"""The shortest time between two statuses of a replica on one connection. A new request is told at once, or when this
has passed.
"""

STATUS_LOOK_S = 0.25
"""How often other changes are looked for."""

STATUS_BEAT_S = 1.0
"""The longest time between two statuses, when nothing changes."""

_KEY_BYTES = 8
_SCARCE_SHARE = 1 / 16  # of the KV cache

ON_REPLICA = "replica:"
"""How the affinity of a request begins that only one replica may run; its id follows. Other affinities begin with other
words.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a replica. `queued_tokens`: prompt tokens that are not computed yet. `others`: its requests that came
    from other ingresses than the reader, whose own it knows better.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    others: int = 0

    @property
    def is_cramped(self) -> bool:
        """Whether requests wait because the KV cache is almost full."""
        return self.waiting > 0 and self.free_blocks < _SCARCE_SHARE * self.total_blocks


@dataclass(frozen=True, slots=True)
class Status:
    """One status, sent over the side channel.

    `adapters`: packed by `pack_adapters`; None: as in the last status on this connection. `good_for_s`: a status that
    is older than this does not count.
    """

    app: str
    replica_id: str
    is_ready: bool
    good_for_s: float
    load: Load
    adapters: bytes | None

    def after(self, last: "Status | None") -> "Status":
        """The same status without the adapters, if the last one on the connection had the same."""
        return replace(self, adapters=None) if last is not None and last.adapters == self.adapters else self


@lru_cache(maxsize=1 << 16)
def adapter_key(digest: str) -> bytes:
    """The short name of an adapter in reports."""
    return hashlib.blake2b(digest.encode(), digest_size=_KEY_BYTES).digest()


def pack_adapters(digests: Iterable[str]) -> bytes:
    """The same for equal sets of adapters."""
    return b"".join(sorted({adapter_key(digest) for digest in digests}))


def unpack_adapters(packed: bytes) -> frozenset[bytes]:
    """The `adapter_key` of each adapter."""
    return frozenset(packed[at : at + _KEY_BYTES] for at in range(0, len(packed), _KEY_BYTES))
