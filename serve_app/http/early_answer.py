"""Reads on after an answer that was given before the request's body had come."""

import asyncio
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_QUIET_S = 2.0  # without a byte, after which nothing more is expected
_TOTAL_S = 30.0
_MAX_DRAINING = 64  # Serve counts each among the requests that it lets in, and none needs a key
_KEPT_BYTES = 1 << 20  # up to here the connection stays open for the next request


class EarlyAnswer:
    """ASGI middleware. A refusal often comes first: a wrong key, a body that is too large. A server that closes a
    connection while bytes come in resets it, and the client may lose the answer that it has not read yet, since most
    send everything before they read (RFC 9112, section 9.6). So the answer goes out whole, what still comes is thrown
    away, for `total_s` at most and until nothing has come for two seconds, and only then the exchange ends. The layers
    inside do not wait for that. Beyond a number of them at a time the next ones end at once.
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
    """How far the body of a request was read when the answer to it ended."""

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

    async def send(self, message: Message) -> None:
        await self._send(message if self._was_read else self._early(message))

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
    """Whether the rest of the body is worth reading for the connection's sake, and is going to come: who expects a
    100 Continue may keep it back after a refusal.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    return b"expect" not in headers and length.isdigit() and int(length[:19]) <= _KEPT_BYTES
