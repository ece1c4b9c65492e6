"""Cancels a request when its client disconnects."""

import asyncio
from types import TracebackType
from typing import Self

from serve_app.http.exchange import ClientLeft, Exchange


class CancelOnDisconnect:
    """A context whose body is cancelled, and left with `ClientLeft`, when the client closes the connection.

    Enter it after the request body was read: it consumes the server's messages from then on.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._receive = exchange.receive
        self._has_left = False
        self._task: asyncio.Task[object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.current_task()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        assert self._watcher is not None
        if not self._has_left:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})
            return
        if not isinstance(exc, asyncio.CancelledError):  # the cancellation came too late for the body: handle it here
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError as cancelled:
                exc = exc or cancelled
        still_cancelled = self._task.uncancel()
        if isinstance(exc, asyncio.CancelledError) and not still_cancelled:
            raise ClientLeft from exc

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        assert self._task is not None
        self._task.cancel()
