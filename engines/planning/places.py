"""Places shared between tenants: in the waiting queue when it is full, and among the running when all are taken."""

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def whom_to_displace(holders: Sequence[tuple[str, T]], tenant: str) -> T | None:
    """Whose place a tenant without one may have: that of the last who came of the tenant with the most places, as long
    as that tenant has more even then. So places even out and never change hands in turn. None: nobody's.

    `holders`: the tenants of all places and what holds each, oldest first.
    """
    counts = Counter(name for name, _ in holders)
    if not counts:
        return None
    most, count = counts.most_common(1)[0]
    if count < counts[tenant] + 2:
        return None
    return next(holder for name, holder in reversed(holders) if name == most)
