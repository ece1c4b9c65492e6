"""Threads for work that grows with what a caller sent: parsing, rendering, tokenising, writing long replies."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from engines.switching import switch_soon

_INLINE_US = 2_000  # what the event loop may spend at a time; a thread costs about 100
_LARGE_US = 200_000

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Two lanes: large pieces of work share two threads, so that they wait for, and use memory beside, few others.
    `close` it.
    """

    def __init__(self, num_threads: int = 4) -> None:
        switch_soon()  # else the event loop would wait 5 ms for them after each write to a socket
        self._common = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
        self._large = ThreadPoolExecutor(2, thread_name_prefix="large-work")

    async def run(self, cost_us: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes about so many microseconds: here if that is short, else in a thread."""
        if cost_us <= _INLINE_US:
            return function(*args, **kwargs)
        lane = self._common if cost_us <= _LARGE_US else self._large
        return await asyncio.get_running_loop().run_in_executor(lane, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Does not wait for what runs."""
        self._common.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
