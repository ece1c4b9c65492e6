"""The threads of one root, and how long it may take to say what it has. If it hangs, it keeps no other root waiting."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from serve_app.base.errors import CheckpointUnavailable

P = ParamSpec("P")
T = TypeVar("T")

LOOK_S: Final = 5.0
_PASSED_BY_S: Final = 10.0


class NoAnswer(CheckpointUnavailable):
    """The root does not say whether it has the checkpoint."""


class RootThreads:
    """`looks` runs calls that ask whether something is there, `reads` calls that read or download a checkpoint,
    `entries` calls to the disk cache, and `searches` listings. Owned by one event loop. `close` it.
    """

    def __init__(self, look_s: float = LOOK_S, elapsed: Callable[[], float] = time.monotonic) -> None:
        """`look_s`: how long a look may take."""
        self.looks = ThreadPoolExecutor(8, thread_name_prefix="checkpoint-look")
        self.reads = ThreadPoolExecutor(4, thread_name_prefix="checkpoint-read")
        self.entries = ThreadPoolExecutor(4, thread_name_prefix="checkpoint-entry")
        self.searches = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-list")
        self._look_s = look_s
        self._elapsed = elapsed
        self._passed_by_until = -math.inf

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """For one look. After one that took too long, the root is passed by at once for a while, or until it answers.
        Then one request looks again, and the others pass by until it has its answer. Raises `NoAnswer`.
        """
        now = self._elapsed()
        if now < self._passed_by_until:
            raise NoAnswer("A store of checkpoints did not answer in time, and is not asked for some seconds.")
        if self._passed_by_until > -math.inf:
            self._pass_by()
        try:
            async with asyncio.timeout(self._look_s):
                yield
        except TimeoutError as exc:
            self._pass_by()
            raise NoAnswer(f"A store of checkpoints did not answer within {self._look_s:g} s.") from exc
        self._passed_by_until = -math.inf

    def answering(self, call: Callable[P, T]) -> Callable[P, T]:
        """The call, which shows when it ends that the root answers. It may be this process that was stopped."""

        def answer(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            finally:
                self._passed_by_until = -math.inf

        return answer

    def _pass_by(self) -> None:
        self._passed_by_until = self._elapsed() + _PASSED_BY_S

    def close(self) -> None:
        """Running calls finish later; their results are dropped."""
        for threads in (self.looks, self.reads, self.entries, self.searches):
            threads.shutdown(wait=False, cancel_futures=True)
