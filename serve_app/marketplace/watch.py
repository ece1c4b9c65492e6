"""Ends a reply for which its reader waits too long."""

import asyncio
import math
from collections.abc import Callable


class Watch:
    """Calls `end` when a wait lasts longer than `idle_s`, or beyond `ends_at`; `late` then says which. `close` it.

    It has one timer, which looks again when the present wait would be too long. A timer for each wait costs 6 µs.
    """

    def __init__(self, idle_s: float, ends_at: float, end: Callable[[], None]) -> None:
        """`ends_at`: a time of the running loop."""
        self.late = ""
        self._idle_s = idle_s
        self._ends_at = ends_at
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._due = math.inf  # while nobody waits
        self._timer: asyncio.TimerHandle | None = None

    def wait_begins(self) -> None:
        self._due = min(self._ends_at, self._loop.time() + self._idle_s)
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._look)

    def wait_ends(self) -> None:
        self._due = math.inf

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if self._due > now:
            self._timer = self._loop.call_at(min(self._due, now + self._idle_s), self._look)
            return
        self.late = "took too long in all" if self._due >= self._ends_at else "was silent for too long"
        self._end()
