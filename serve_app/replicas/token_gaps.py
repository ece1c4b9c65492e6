"""How far apart the tokens of replies come, counted while they come."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class TokenGaps:
    """The tokens of one model, but for the first of each reply, by the time since the token before.

    `counts`: as many as `BOUNDS_S`, and one for what is above. Tokens that are read together share the time since the
    last reading: the reader may have been held up by its client.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float, num_tokens: int) -> None:
        """Called for every delta: it must cost less than a microsecond."""
        if num_tokens:
            self.counts[bisect_left(BOUNDS_S, seconds / num_tokens)] += num_tokens
            self.total_s += seconds
