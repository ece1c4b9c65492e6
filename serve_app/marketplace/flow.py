"""Hands what comes from an upstream to its reader in the call of the event loop that has received it.

A task that reads is woken up in another turn of the loop, through everything that awaits it. For a token at a time that
costs more than all the rest.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler


class Connection(ResponseHandler):
    """A connection to an upstream. `on_change` is called after each piece of a body, and after the end."""

    on_change: Callable[[], None] | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.on_change is not None:
            self.on_change()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self.on_change is not None:
            self.on_change()


class Connector(aiohttp.TCPConnector):
    """With such connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        make: Callable[..., ResponseHandler] = Connection
        self._factory = partial(make, loop=self._loop)  # aiohttp 3.14 has no public way


async def flow(response: aiohttp.ClientResponse, step: Callable[[], Awaitable[None] | bool]) -> None:
    """Call `step` whenever something came. It returns True to go on, False to end this, or what must be waited for
    before more is read: this waits for it and returns. Raises what `step` raises.
    """
    connection = response.connection
    if connection is None or not isinstance(connection.protocol, Connection):
        return  # all of it was received
    protocol = connection.protocol
    over: asyncio.Future[Awaitable[None] | bool] = asyncio.get_running_loop().create_future()
    is_stepping = False

    def on_change() -> None:
        nonlocal is_stepping
        if is_stepping:
            return  # reading made room for more; the step that reads goes on
        is_stepping = True
        try:
            result = step()
        except Exception as exc:
            _end(over, exc)
        else:
            if result is not True:
                _end(over, result)
        finally:
            is_stepping = False
        if over.done() and protocol.on_change is on_change:
            protocol.on_change = None  # the connection may serve another request at once

    protocol.on_change = on_change
    try:
        on_change()
        rest = await over
    finally:
        if protocol.on_change is on_change:
            protocol.on_change = None
    if not isinstance(rest, bool):
        await rest


def _end(over: "asyncio.Future[Awaitable[None] | bool]", result: Awaitable[None] | bool | Exception) -> None:
    if over.done():  # its task was cancelled
        return
    if isinstance(result, Exception):
        over.set_exception(result)
    else:
        over.set_result(result)


def started(coroutine: Coroutine[Any, Any, None]) -> Awaitable[None] | None:
    """Run it up to where it waits; None if it did not. For coroutines that need no task of their own until then."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return _Rest(coroutine, waits_for)


class _Rest:
    """The rest of a coroutine that waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: object) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    sent = yield waits_for
                except BaseException as exc:  # a cancellation, which belongs to what waits
                    waits_for = self._coroutine.throw(exc)
                else:
                    waits_for = self._coroutine.send(sent)
        except StopIteration:
            return
