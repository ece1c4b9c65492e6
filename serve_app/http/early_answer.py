"""Reads the rest of a request body after an early answer."""

import asyncio
import time
from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_QUIET_S = 2.0  # without a byte, after which no more are expected
_TOTAL_S = 30.0
_MAX_DRAINING = 64  # Serve counts each among the requests that it lets in, and none needs a key
_KEPT_BYTES = 1 << 20  # up to here the connection stays open for the next request


class EarlyAnswer:
    """ASGI middleware. The service often answers before the whole body has arrived: a wrong key, a body that is too
    large. A server that closes a connection while bytes arrive resets it (RFC 9112, section 9.6). Most clients send
    everything before they read, so they may lose the answer. So this layer sends the whole answer, then reads and drops
    the rest of the body. It stops after `total_s`, or after two seconds without a byte, and ends the exchange. The
    inner layers do not wait for this. Their number is bounded: exchanges over the bound end at once.
    """

    def __init__(self, app: ASGIApp, total_s: float = _TOTAL_S) -> None:
        self._app = app
        self._total_s = total_s
        self._num_draining = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, send)
        await self._app(scope, body.receive, body.send)
        if body.is_answered_early:
            if self._num_draining < _MAX_DRAINING:
                await self._read_on(body.receive)
            await send({"type": "http.response.body", "body": b""})

    async def _read_on(self, receive: Receive) -> None:
        end = time.monotonic() + self._total_s
        self._num_draining += 1
        try:
            while (left := end - time.monotonic()) > 0:
                async with asyncio.timeout(min(_QUIET_S, left)):
                    if not _is_more(await receive()):
                        return
        except TimeoutError:
            return
        finally:
            self._num_draining -= 1


class _Body:
    """How much of a request body was read when its answer ended."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._was_asked_for = False
        self._was_read = False
        self.is_answered_early = False

    async def receive(self) -> Message:
        self._was_asked_for = True
        message = await self._receive()
        if not _is_more(message):
            self._was_read = True
        return message

    def send(self, message: Message) -> Awaitable[None]:
        return self._send(message if self._was_read else self._early(message))

    def _early(self, message: Message) -> Message:
        if message["type"] == "http.response.start":
            if self._was_asked_for or not _is_small(self._scope):
                return {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_answered_early = True
            return {**message, "more_body": True}
        return message


def _is_more(message: Message) -> bool:
    return message["type"] == "http.request" and bool(message.get("more_body"))


def _has_body(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or bool(headers.get(b"content-length", b"0").strip(b"0"))


def _is_small(scope: Scope) -> bool:
    """Whether the rest of the body is small enough to read to keep the connection, and will arrive. A client that
    expects 100 Continue may not send it after a refusal.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return b"expect" not in headers and length.isdigit() and int(length[:19]) <= _KEPT_BYTES
