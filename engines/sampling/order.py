"""The tokens of one row by likelihood, for truncation that keeps too many of them to look at the first ones only.

A sort of 49,152 tokens takes 2 to 3 ms a row. Here they fall into buckets by the upper bits of their weights, as in a
radix sort, and only the buckets that are asked for are sorted.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

UNIT = 2.0**-50
"""Weights are summed up as multiples of it. Such sums are exact in float64, so they do not depend on the order."""

_LOWER_BITS = 16
_BUCKETS = (0x3F800000 >> _LOWER_BITS) + 1  # up to the bits of 1.0


def units(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Weights in [0, 1] as whole numbers of `UNIT`, rounded down."""
    found: NDArray[np.float64] = np.floor(weights.astype(np.float64) / UNIT)
    return found


class Order:
    """Tokens in descending order of their weights [vocab], which are in [0, 1]; of equal ones the lowest id first."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self._weights = weights
        # Of numbers that are not negative the bits are in the order of the values. Bucket 0 holds the largest.
        self._bucket_of = _BUCKETS - 1 - (weights.view(np.int32) >> _LOWER_BITS)
        self._buckets: dict[int, NDArray[np.float32]] = {}

    def sum(self, count: int) -> float:
        """Of the first `count` tokens, in units."""
        bucket, within = self._place(count - 1)
        before = self._sums[bucket - 1] if bucket else 0.0
        return float(before + units(self._sorted(bucket)[: within + 1]).sum())

    def reaching(self, amount: float) -> int:
        """How many tokens it takes until their sum is at least this many units; at most all."""
        bucket = int(np.searchsorted(self._sums, amount))
        if bucket == _BUCKETS:
            return len(self._weights)
        before = float(self._sums[bucket - 1]) if bucket else 0.0
        within = int(np.searchsorted(units(self._sorted(bucket)).cumsum(), amount - before))
        return within + 1 + (int(self._counts[bucket - 1]) if bucket else 0)

    def at_least(self, weight: float) -> int:
        """How many tokens have at least this weight."""
        return int(np.count_nonzero(self._weights >= np.float64(weight)))

    def token(self, rank: int) -> int:
        """The token at this place of the order, counted from 0."""
        bucket, within = self._place(rank)
        members = self._sorted(bucket)
        ties = within - int(np.searchsorted(-members, -members[within]))
        return int(np.flatnonzero(self._weights == members[within])[ties])

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        """Tokens in this bucket and those before it."""
        return np.bincount(self._bucket_of, minlength=_BUCKETS).cumsum()

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        """Units in this bucket and those before it."""
        return np.bincount(self._bucket_of, weights=units(self._weights), minlength=_BUCKETS).cumsum()

    def _place(self, rank: int) -> tuple[int, int]:
        """The bucket of a token, and its place in it."""
        bucket = int(np.searchsorted(self._counts, rank, side="right"))
        return bucket, rank - (int(self._counts[bucket - 1]) if bucket else 0)

    def _sorted(self, bucket: int) -> NDArray[np.float32]:
        """The weights of a bucket in descending order."""
        if bucket not in self._buckets:
            self._buckets[bucket] = np.sort(self._weights[self._bucket_of == bucket])[::-1]
        return self._buckets[bucket]
