"""How many prompt tokens a step computes beside decoding, to bound the latency between tokens."""

from collections import deque
from statistics import median

_WINDOW = 9
"""How many steps are remembered. Their median is used, since other work on the machine may stretch any single one."""

_SMALLEST = 32
"""Tokens below which a prefill is not cut: the overhead of a forward is too high for fewer."""

_MULTIPLE = 16


class PrefillPace:
    """Measures decoding and prefill, and returns how many prompt tokens take at most `ratio` times as long as decoding.
    The result is at most `limit`, and at least 32 unless the limit is lower.
    """

    def __init__(self, limit: int, ratio: float) -> None:
        self._limit = limit
        self._ratio = ratio
        self._decode_s: deque[float] = deque(maxlen=_WINDOW)
        self._s_per_token: deque[float] = deque(maxlen=_WINDOW)

    def decoded(self, seconds: float) -> None:
        """One step's decoding took this long."""
        self._decode_s.append(seconds)

    def prefilled(self, tokens: int, seconds: float) -> None:
        """One step's prefill of so many tokens took this long. Small prefills are ignored: they say nothing about large
        ones.
        """
        if tokens >= _SMALLEST:
            self._s_per_token.append(seconds / tokens)

    @property
    def tokens(self) -> int:
        """The budget of the next step that decodes. It is the limit until enough has been measured."""
        if not self._decode_s or not self._s_per_token:
            return self._limit
        fitting = int(self._ratio * median(self._decode_s) / max(median(self._s_per_token), 1e-9))
        return min(self._limit, max(_SMALLEST, fitting - fitting % _MULTIPLE))
