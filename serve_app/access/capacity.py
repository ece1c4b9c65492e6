"""The requests that one ingress runs at a time: their number, and their end when it stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.base.errors import Overloaded


class Capacity:
    """Bounds the requests of this process, over all keys. A request over the bound is refused at once; none waits."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._running: set[asyncio.Task[object]] = set()  # a task runs one request

    @property
    def num_running(self) -> int:
        return len(self._running)

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request for as long as the context lasts. Raises `Overloaded`; then nothing was counted."""
        if self.num_running >= self._max_requests:
            raise Overloaded("The service is at its limit of requests; try again.")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    async def end_all(self, within_s: float) -> None:
        """Cancel the requests that still run, and wait until they have ended, for so long at most."""
        running = self._running - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=within_s)
