"""A client of one remote OpenAI-compatible API.

Nothing that an upstream does holds a request for longer than the limits of its configuration, or takes more memory than
one event. It is read only as fast as the client reads. Of its headers only the type, the encoding and `retry-after` are
looked at; none is passed on. It gets no header of the client.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from serve_app.base.errors import ReplyOverLimit, UpstreamFailed, UpstreamOverLimit
from serve_app.base.public_addresses import NotPublic, PublicResolver
from serve_app.config.marketplace import UpstreamConfig
from serve_app.marketplace.events import Event, Events, EventTooLong
from serve_app.marketplace.flow import Connection, Connector, flow, started
from serve_app.marketplace.refusals import error_of, error_status, judged
from serve_app.marketplace.relay import DONE, MAX_WHOLE_VALUES, SMALL_BYTES, parsed
from serve_app.marketplace.secret import Secret
from serve_app.marketplace.watch import Watch

_READ_BUFFER_BYTES: Final = 1 << 16
_MAX_WHOLE_BYTES: Final = 16 << 20
_MAX_ERROR_BYTES: Final = 1 << 16
_DRAIN_TIMEOUT_S: Final = 0.25
_IDLE_CONNECTION_S: Final = 15.0
_NAME_TTL_S: Final = 30
_STREAM: Final = "text/event-stream"
_PAGES: Final = frozenset({"text/html", "application/xhtml+xml"})
_IS_JSON: Final = re.compile(r"application/(.+\+)?json")
Take = Callable[[Sequence[Event]], Awaitable[None] | None]
Write = Callable[[bytes], Coroutine[Any, Any, None]]
_BROKEN: Final = (aiohttp.ClientError, HttpProcessingError, OSError)


class UpstreamReply:
    """A reply that has begun. Read it to its end, or leave `Upstream.open`, which closes its connection."""

    def __init__(self, response: aiohttp.ClientResponse, config: UpstreamConfig, secret: Secret) -> None:
        self.content = b""
        self._response = response
        ends_at = asyncio.get_running_loop().time() + config.total_timeout_s
        self._watch = Watch(config.idle_timeout_s, ends_at, self._end_late)
        self._secret = secret
        self._events = Events()
        self._next: list[Event] = []  # came, and were not read yet
        self._is_over = False

    async def flow(self, again: Callable[[bytes], bytes], write: Write, take: Take) -> None:
        """Handle what comes at once, until there is something that `read` must return. `again` says what is written for
        a piece that is one event like the last one, nothing for others: `take` gets the events of those. What either
        waits for is waited for before more is read. Raises `ReplyOverLimit`, and what these raise.
        """
        self._watch.wait_begins()
        try:
            await flow(self._response, partial(self._step, again, write, take))
        except EventTooLong as exc:
            raise ReplyOverLimit(f"The upstream sent too much: {exc}.") from exc
        finally:
            self._watch.wait_ends()

    def _step(self, again: Callable[[bytes], bytes], write: Write, take: Take) -> Awaitable[None] | bool:
        content = self._response.content
        if self._next or self._is_over or content.is_eof() or content.exception() is not None:
            return False
        piece = content.read_nowait()
        if self._events.is_between_events and (shown := again(piece)):
            rest = started(write(shown))
        else:
            if piece:
                self._feed(piece)
            if not self._next:
                return True
            if self._is_over or any(map(_may_be_error, self._next)):
                return False
            events, self._next = self._next, []
            rest = take(events)
        if rest is not None:
            self._watch.wait_ends()  # it is the client who is waited for
            return rest
        self._watch.wait_begins()
        return True

    async def read(self) -> Sequence[Event]:
        """The events that came, at least one, the `[DONE]` included; none after the last one. An error comes alone.
        Reads no more from the upstream than it is called for. Raises `ReplyOverLimit`.
        """
        if not self._next:
            await self._receive_in_time()
        if len(self._next) == 1:
            events, self._next = self._next, []
            return events
        count = next((index for index, event in enumerate(self._next) if _may_be_error(event)), len(self._next))
        events, self._next = self._next[: count or 1], self._next[count or 1 :]
        return events

    async def begin(self) -> None:
        """Wait for the first event. Raises `UpstreamFailed` or `UpstreamRefused` if it is none of a reply."""
        await self._receive()
        first = self._next[0] if self._next else Event(DONE)
        if first.data == DONE:
            raise UpstreamFailed("The upstream sent an empty stream.")
        value = parsed(first.data)
        if value is None:
            raise _unreadable("an event", first.data)
        error = error_of(value) or (value if first.name == b"error" else None)
        if error is not None:
            raise judged(error_status(error), first.data, self._secret)

    async def take_whole(self) -> None:
        """Wait for a reply that is no stream. Raises `UpstreamFailed` or `UpstreamRefused` if it is no reply."""
        content = await read_at_most(self._response, _MAX_WHOLE_BYTES + 1)
        if len(content) > _MAX_WHOLE_BYTES:
            raise UpstreamOverLimit(f"The upstream sent more than {_MAX_WHOLE_BYTES} bytes.")
        value = parsed(content, max_values=MAX_WHOLE_VALUES)
        if value is None:
            raise _unreadable("a reply", content)
        if (error := error_of(value)) is not None:
            raise judged(error_status(error), content, self._secret)
        self.content = content
        self._is_over = True

    async def drain(self) -> None:
        """Wait for the end that follows the last event, so that the connection can be used again."""
        if self._is_over:
            with suppress(*_BROKEN):
                async with asyncio.timeout(_DRAIN_TIMEOUT_S):
                    await read_at_most(self._response, _READ_BUFFER_BYTES)

    def close(self) -> None:
        self._watch.close()
        self._response.close()  # if it was read to its end, its connection is in the pool already

    async def _receive_in_time(self) -> None:
        self._watch.wait_begins()
        try:
            await self._receive()
        except _BROKEN as exc:
            if self._watch.late:
                raise ReplyOverLimit(f"The upstream {self._watch.late}.") from exc
            self._is_over = True  # `Relay.end` tells whether the reply was complete by then
        except EventTooLong as exc:
            raise ReplyOverLimit(f"The upstream sent too much: {exc}.") from exc
        finally:
            self._watch.wait_ends()

    async def _receive(self) -> None:
        while not self._next and not self._is_over:
            self._feed(await self._response.content.readany())
            if not self._next:
                await asyncio.sleep(0)  # else what is decompressed without an event in it would block the loop

    def _feed(self, content: bytes) -> None:
        """The next piece; empty at the end."""
        self._next = self._events.feed(content) if content else self._events.finish()
        self._is_over = not content
        for index, event in enumerate(self._next):
            if event.data == DONE:
                self._is_over = True
                del self._next[index + 1 :]
                break

    def _end_late(self) -> None:
        connection = self._response.connection
        self._response.close()
        if connection is not None and isinstance(connection.protocol, Connection) and connection.protocol.on_change:
            connection.protocol.on_change()  # which finds the reply broken


class Upstream:
    """Owns the pooled connections to it, in the event loop of its requests; `close` it."""

    def __init__(self, config: UpstreamConfig, key: str | None = None) -> None:
        """`key`: sent as a bearer token."""
        self.config = config
        self.key = key
        self.secret = Secret(key)
        self._url = config.url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._num_open = 0
        self._is_closing = False

    @asynccontextmanager
    async def open(self, path: str, body: bytes, *, stream: bool) -> AsyncIterator[UpstreamReply]:
        """Ask it. `path`: `/completions` or `/chat/completions`; `body`: of `outgoing`. Enters once the first event, or
        the whole reply, is there. Raises `UpstreamFailed`, and `UpstreamRefused` where the caller is at fault.
        """
        self._num_open += 1
        try:
            reply = await self._begun(path, body, stream=stream)
            try:
                yield reply
                await reply.drain()
            finally:
                reply.close()
        finally:
            self._num_open -= 1
            await self._close_if_unused()

    async def close(self) -> None:
        """Close the idle connections now, and each of the others at the end of its reply."""
        self._is_closing = True
        await self._close_if_unused()

    async def _close_if_unused(self) -> None:
        if self._is_closing and not self._num_open and self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _begun(self, path: str, body: bytes, *, stream: bool) -> UpstreamReply:
        limit_s = self.config.first_byte_timeout_s if stream else self.config.total_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                response = await self._post(path, body, _STREAM if stream else "application/json")
                try:
                    return await self._judged(response, stream=stream)
                except BaseException:
                    response.close()
                    raise
        except TimeoutError as exc:
            raise UpstreamOverLimit("The upstream did not answer in time.") from exc
        except NotPublic as exc:
            raise UpstreamFailed("The upstream is not at a public address.") from exc
        except EventTooLong as exc:
            raise UpstreamOverLimit(f"The upstream sent too much: {exc}.") from exc
        except _BROKEN as exc:
            raise UpstreamFailed(f"The connection to the upstream failed: {type(exc).__name__}.") from exc

    async def _post(self, path: str, body: bytes, accept: str) -> aiohttp.ClientResponse:
        """A kept connection may have been closed by the upstream meanwhile: then another one is used."""
        connect_s = self.config.connect_timeout_s
        while True:
            used = SimpleNamespace(is_kept=False)
            try:
                return await self._opened().post(
                    self._url + path,
                    data=body,
                    headers={"accept": accept},
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=None, connect=connect_s, sock_connect=connect_s),
                    trace_request_ctx=used,
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if not used.is_kept:
                    raise

    async def _judged(self, response: aiohttp.ClientResponse, *, stream: bool) -> UpstreamReply:
        media_type = response.content_type.lower()
        if not 200 <= response.status < 300:
            body = b"<!" if media_type in _PAGES else await read_at_most(response, _MAX_ERROR_BYTES)
            raise judged(response.status, body, self.secret, response.headers.get("retry-after", ""))
        if media_type in _PAGES:
            raise UpstreamFailed("The upstream answered with a page.")
        reply = UpstreamReply(response, self.config, self.secret)
        if stream and not _IS_JSON.fullmatch(media_type):
            await reply.begin()
            return reply
        await reply.take_whole()
        if stream:
            raise UpstreamFailed("The upstream did not stream.")
        return reply

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            resolver = None if self.config.allow_private else PublicResolver()
            connector = Connector(
                resolver=resolver, limit=0, ttl_dns_cache=_NAME_TTL_S, keepalive_timeout=_IDLE_CONNECTION_S
            )
            traces = aiohttp.TraceConfig()
            traces.on_connection_reuseconn.append(_note_kept)
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers(),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                read_bufsize=_READ_BUFFER_BYTES,
                trace_configs=[traces],
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        """Compression would cost CPU, and often the upstream's buffers hold events back."""
        headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "roundhouse"}
        return headers if self.key is None else {**headers, "authorization": f"Bearer {self.key}"}


async def read_at_most(response: aiohttp.ClientResponse, num_bytes: int) -> bytes:
    """The beginning of a body."""
    content = bytearray()
    while len(content) < num_bytes and (piece := await response.content.readany()):
        content += piece
        await asyncio.sleep(0)
    return bytes(content[:num_bytes])


async def _note_kept(session: object, context: SimpleNamespace, params: object) -> None:
    del session, params
    context.trace_request_ctx.is_kept = True


def _unreadable(what: str, content: bytes) -> UpstreamFailed:
    """What is large may have too many values, as of log-probabilities that the request asks for."""
    kind = UpstreamFailed if len(content) <= SMALL_BYTES else UpstreamOverLimit
    return kind(f"The upstream sent {what} that is no JSON object, or has too many values.")


def _may_be_error(event: Event) -> bool:
    return event.name == b"error" or b'"error"' in event.data
