"""Threads for work that grows with the request: parsing, rendering, tokenising, writing long replies."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import ParamSpec, TypeVar

from engines.host.switching import switch_soon

_INLINE_US = 2_000  # the longest work on the event loop; a switch to a thread costs about 100
_LARGE_US = 200_000

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Two pools: large work shares two threads, which bounds the memory in use at a time. `close` it."""

    def __init__(self, num_threads: int = 4) -> None:
        switch_soon()  # else the event loop would wait 5 ms for them after each write to a socket
        self._common = ThreadPoolExecutor(num_threads, thread_name_prefix="work")
        self._large = ThreadPoolExecutor(2, thread_name_prefix="large-work")

    async def run(self, cost_us: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that takes about `cost_us` microseconds: on the event loop if that is short, else in a
        thread.
        """
        if cost_us <= _INLINE_US:
            return function(*args, **kwargs)
        lane = self._common if cost_us <= _LARGE_US else self._large
        context = copy_context()  # with the request's id in the log
        return await asyncio.get_running_loop().run_in_executor(lane, lambda: context.run(function, *args, **kwargs))

    def close(self) -> None:
        """Close; does not wait for running calls."""
        self._common.shutdown(wait=False, cancel_futures=True)
        self._large.shutdown(wait=False, cancel_futures=True)
