"""Server-sent events: the stream sends comments while it has no output, and always ends with `[DONE]` or an error
event.
"""

import asyncio
import json
import time
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from serve_app.api.answer import Answer
from serve_app.api.slugs.relayed import RelayedAnswer
from serve_app.base.errors import HttpError
from serve_app.http.exchange import Exchange

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_MANY_SCORES = 64
_KEEP_ALIVE = b": keep-alive\n\n"
_LAST_WORDS_TIMEOUT_S = 5.0  # for a client that no longer reads


async def send_answer(exchange: Exchange, answer: Answer, keep_alive_s: float) -> bytes:
    """Send all parts as events; returns the last events, up to `[DONE]`. Raises what `Answer.parts` raises; then call
    `send_failure`.
    """
    await exchange.start(200, HEADERS)
    async with EventStream(exchange, keep_alive_s), aclosing(answer.parts()) as parts:
        beginning = answer.chunks.begin()
        async for part in parts:
            is_long = len(part.scored) > _MANY_SCORES
            content = beginning + (await answer.shown(part) if is_long else answer.chunks.part(part))
            beginning = b""
            if content:
                await exchange.write(content)
    return answer.chunks.end(answer.reply.usage)


async def send_relayed(exchange: Exchange, answer: RelayedAnswer, keep_alive_s: float) -> bytes:
    """The same for a remote endpoint. Raises `UpstreamLost`; then call `send_failure`."""
    await exchange.start(200, HEADERS)
    async with EventStream(exchange, keep_alive_s):
        await answer.pass_on(exchange.write)
    return answer.end()


async def send_failure(exchange: Exchange, error: HttpError) -> None:
    """End a started stream with an error event and without `[DONE]`."""
    event = f"data: {json.dumps(error.body())}\n\n".encode()
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
            await exchange.end(event)


class EventStream:
    """The body of a response that has started. Sends a comment whenever nothing was written for `keep_alive_s`."""

    def __init__(self, exchange: Exchange, keep_alive_s: float) -> None:
        self._exchange = exchange
        self._keep_alive_s = keep_alive_s
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._exchange.wrote_at = time.monotonic()
        self._heart = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._heart is not None
        self._heart.cancel()
        await asyncio.wait({self._heart})

    async def _beat(self) -> None:
        while True:
            silent_s = time.monotonic() - self._exchange.wrote_at
            if silent_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silent_s)
            else:
                await self._exchange.write(_KEEP_ALIVE)
