"""How often each token occurs, kept up token by token, in buffers that a tensor can be made from without a loop."""

from array import array
from collections.abc import Iterable


class TokenCounts:
    """`token_ids` (int64) are the distinct tokens in the order in which they came first, `counts` (float64) how often
    each came.
    """

    __slots__ = ("_places", "counts", "token_ids")

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = array("q")
        self.counts = array("d")
        self._places: dict[int, int] = {}
        for token_id in token_ids:
            self.add(token_id)

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self.token_ids))
        if place < len(self.token_ids):
            self.counts[place] += 1.0
        else:
            self.token_ids.append(token_id)
            self.counts.append(1.0)
