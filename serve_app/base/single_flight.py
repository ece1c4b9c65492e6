"""Runs a call once for all callers that request it at the same time."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class SingleFlight(Generic[Key, Result]):
    """Blocking calls on an executor, one per key. Owned by one event loop.

    When a caller is cancelled, the call continues for other and later callers.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._under_way: dict[Key, asyncio.Future[Result]] = {}

    async def run(self, key: Key, call: Callable[[], Result]) -> Result:
        future = self._under_way.get(key)
        if future is None:
            future = asyncio.get_running_loop().run_in_executor(self._executor, call)
            self._under_way[key] = future
            future.add_done_callback(lambda done: self._land(key, done))
        return await asyncio.shield(future)

    def _land(self, key: Key, done: "asyncio.Future[Result]") -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # read the exception, in case no caller waits any more
