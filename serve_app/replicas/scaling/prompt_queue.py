"""What the prompts of one engine ask of it: how long it needs for those that wait, and how many come."""

import time
from collections.abc import Callable

from engines.interface.protocol import EngineStats

MOST_S = 120.0
"""The longest time that is told: an engine that stands still must not ask for replicas without end."""

MOST_LOAD = 8.0
"""The same for the load."""

_LEAST_S = 1.0  # between two measurements
_NEW_SHARE = 0.5  # of a measurement in the average


class PromptQueue:
    """Measures the rate at which prompts are taken from the queue, and compares with it what waits and what comes.

    The rate is measured while enough waits to keep the engine busy from one look to the next: otherwise it could do
    more than it does. It is low too when places in the batch or KV blocks are short, not only when prompts are long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._computed = 0
        self._queued = 0
        self._rate: float | None = None
        self._arriving = 0.0  # tokens a second

    @property
    def queued_s(self) -> float:
        """The time for what waits; 0 until the rate is known."""
        if self._queued == 0 or self._rate is None:
            return 0.0
        return min(MOST_S, self._queued / self._rate) if self._rate > 0 else MOST_S

    @property
    def load(self) -> float:
        """The prompts that come, as a share of those that the engine can compute; 0 until the rate is known."""
        if self._arriving == 0 or self._rate is None:
            return 0.0
        return min(MOST_LOAD, self._arriving / self._rate) if self._rate > 0 else MOST_LOAD

    def look(self, stats: EngineStats) -> None:
        """Measure, if the last time was long enough ago."""
        now, computed, queued = self._clock(), stats.counters.prompt_tokens, stats.queued_tokens
        elapsed = now - self._at
        if elapsed >= _LEAST_S:
            done = (computed - self._computed) / elapsed
            if queued > 0 and self._queued >= max(1, computed - self._computed):
                self._rate = _averaged(self._rate, done)
            elif self._rate is not None:
                self._rate = max(self._rate, done)
            # A request that was cancelled in the queue takes its tokens away without computing them.
            come = max(0.0, done + (queued - self._queued) / elapsed)
            self._arriving = _averaged(self._arriving, come)
            self._at, self._computed, self._queued = now, computed, queued


def _averaged(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW_SHARE * (new - before)
