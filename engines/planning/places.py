"""Places shared between tenants: in a full waiting queue, and among the running requests when all places are taken."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def whom_to_displace(holders: Sequence[tuple[str, T]], tenant: str) -> T | None:
    """The holder whose place a request of `tenant` may take: the newest holder of the tenant with the most places. None
    if that tenant would then have fewer places than the other. So places even out and are never exchanged in turn.

    `holders`: the tenants of all places and what holds each, oldest first.
    """
    counts = Counter(name for name, _ in holders)
    if not counts:
        return None
    most, count = counts.most_common(1)[0]
    if count < counts[tenant] + 2:
        return None
    return next(holder for name, holder in reversed(holders) if name == most)
