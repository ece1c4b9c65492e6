"""The side channel: one frame carries the tokens of all streams of an engine step from a replica directly to an
ingress.

Serve's own streaming costs one message per token and stream. Here the ingress listens on a TCP port, and passes
`Endpoint` and a stream id in a unary Serve call. The call stays open as long as the request runs. So Serve still does
queue lengths, autoscaling, cancellation and the detection of dead replicas. The replica keeps one connection per
ingress.

A replica that was asked for it also tells its status on the connection (`status_sender.py`).

    ingress: Listener.open() -> Stream.receive()      <- frames -      replica: Links.to(endpoint) -> Link.deliver()

This file is the ingress's end; `link.py` is the replica's end.
"""

import asyncio
import hmac
import itertools
import logging
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

from engines.interface.protocol import TokenDelta
from serve_app.base.errors import ReplicaLost
from serve_app.replicas.channel.frames import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    Event,
    FrameError,
    decode_events,
    encode_stream_ids,
    read_frame,
)
from serve_app.replicas.status import Status
from serve_app.replicas.unread import Unread

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
LAST_FRAME_TIMEOUT_S = 5.0
MAX_STRANGERS = 256  # connections that have not sent their hello yet
_BIG_FRAME_BYTES = 128 << 10  # decoding more than this takes milliseconds: off the event loop

BROKEN = (asyncio.IncompleteReadError, ConnectionError, FrameError, TimeoutError, OSError)


def _ignore(status: Status) -> None:
    del status


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address on which an ingress listens. The holder of the token may write to its streams."""

    host: str
    port: int
    token: bytes = field(repr=False)


class Stream:
    """The ingress's end of one request. Used by one task; always `close` it."""

    def __init__(self, listener: "Listener", stream_id: int) -> None:
        self.stream_id = stream_id
        self._listener = listener
        self._connection: asyncio.StreamWriter | None = None
        self._accepted = False
        self._unread = Unread()
        self._finished = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._last_frame_timeout: asyncio.TimerHandle | None = None

    @property
    def is_finished(self) -> bool:
        """Whether no more deltas will come."""
        return self._finished or self._error is not None

    async def accepted(self) -> None:
        """Wait until a replica has the request, or it has failed; `receive` shows which."""
        while not (self._accepted or self.is_finished):
            await self._wait()

    async def receive(self) -> TokenDelta:
        """All tokens since the last call, at least one.

        Raises the `EngineError` that ended the request, `ReplicaLost`, or `ClientTooSlow` when too much is unread. Do
        not call it again after the last delta.
        """
        while not self._unread:
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._unread.take()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, unless it has ended already. Earlier deltas can still be read."""
        if not self.is_finished:
            self._error = error
            self._changed.set()

    def call_ended(self) -> None:
        """The Serve call has returned: its last frame will arrive soon, or was lost with its connection. If it was the
        call of a replica whose tokens are ignored, the other replica's stream continues.
        """
        if not self.is_finished:
            self._expect_next()

    def _expect_next(self) -> None:
        """Require the next frame within a short time from now."""
        if self._last_frame_timeout is not None:
            self._last_frame_timeout.cancel()
        lost = ReplicaLost("The replica's last tokens did not arrive.")
        loop = asyncio.get_running_loop()
        self._last_frame_timeout = loop.call_later(self._listener.last_frame_timeout_s, self.fail, lost)

    def close(self) -> None:
        """Close the stream; tell the replica if it still generates. Idempotent."""
        if self._last_frame_timeout is not None:
            self._last_frame_timeout.cancel()
        self._listener._forget(self, self._connection)

    def _is_from(self, connection: asyncio.StreamWriter) -> bool:
        """Whether the stream takes its tokens from this connection, that of the first replica that accepted it. Serve
        may repeat a call whose state it lost, and then two replicas may generate for one stream.
        """
        if self._connection is None:
            self._connection = connection
        return self._connection is connection

    def _take(self, event: Event) -> None:
        if self.is_finished:
            return
        self._accepted = True
        if self._last_frame_timeout is not None:
            self._expect_next()
        if isinstance(event, TokenDelta):
            too_slow = self._unread.add(event)
            self._finished = event.finish_reason is not None
            if too_slow is not None:
                self.fail(too_slow)
        elif event is not None:
            self.fail(event)
        self._changed.set()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class Listener:
    """The ingress's end of the channel: one port, all replicas of all models.

    `last_frame_timeout_s`: how long a stream waits for its last frame after its Serve call has returned. `on_status`:
    gets what replicas tell about themselves.
    """

    def __init__(
        self,
        *,
        last_frame_timeout_s: float = LAST_FRAME_TIMEOUT_S,
        on_status: Callable[[Status], None] = _ignore,
    ) -> None:
        self.last_frame_timeout_s = last_frame_timeout_s
        self._on_status = on_status
        self._token = secrets.token_bytes(32)
        self._server: asyncio.Server | None = None
        self._endpoint: Endpoint | None = None
        self._stream_ids = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers = Strangers(MAX_STRANGERS)

    @classmethod
    async def start(
        cls,
        host: str,
        *,
        last_frame_timeout_s: float = LAST_FRAME_TIMEOUT_S,
        on_status: Callable[[Status], None] = _ignore,
    ) -> Self:
        """Listen on a free port of `host`, an address that replicas can reach."""
        listener = cls(last_frame_timeout_s=last_frame_timeout_s, on_status=on_status)
        listener._server = await asyncio.start_server(listener._greet, host, 0)
        port = listener._server.sockets[0].getsockname()[1]
        listener._endpoint = Endpoint(host, port, listener._token)
        return listener

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "not started"
        return self._endpoint

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def open(self) -> Stream:
        stream = Stream(self, next(self._stream_ids))
        self._streams[stream.stream_id] = stream
        return stream

    async def close(self) -> None:
        """Stop listening, drop all connections, end all streams with `ReplicaLost`."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for stream in self._streams.values():
            stream.fail(ReplicaLost("The ingress is stopping."))

    def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        streams: set[int] = set()
        try:
            await self._authenticate(reader, writer)
            keep_alive(writer)
            while True:
                body = await read_frame(reader, MAX_FRAME_BYTES)
                if len(body) > _BIG_FRAME_BYTES:
                    events = await asyncio.to_thread(decode_events, body)
                else:
                    events = decode_events(body)
                self._dispatch(events, writer, streams)
        except asyncio.IncompleteReadError as exc:
            if exc.partial:
                logger.warning("side channel: the connection from %s ended inside a frame", peer)
        except BROKEN as exc:
            logger.warning("side channel: closing the connection from %s: %s", peer, exc or type(exc).__name__)
        finally:
            writer.transport.abort()
            for stream_id in streams:
                if stream_id in self._streams:
                    self._streams[stream_id].fail(ReplicaLost("The connection to the replica was lost."))

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._strangers.holding(writer):
            hello = await asyncio.wait_for(read_frame(reader, MAX_HELLO_BYTES), HELLO_TIMEOUT_S)
        if not hmac.compare_digest(hello, self._token):
            raise FrameError("wrong token")

    def _dispatch(
        self, events: Sequence[tuple[int, Event | Status]], connection: asyncio.StreamWriter, streams: set[int]
    ) -> None:
        unwanted = []
        for stream_id, event in events:
            if isinstance(event, Status):
                self._on_status(event)
                continue
            stream = self._streams.get(stream_id)
            if stream is None or not stream._is_from(connection):
                streams.discard(stream_id)
                unwanted.append(stream_id)
                continue
            streams.add(stream_id)
            stream._take(event)
            if stream.is_finished:
                streams.discard(stream_id)
        if unwanted:
            # Serve's cancellation can miss a call while it is being assigned; this message cannot.
            connection.write(encode_stream_ids(unwanted))

    def _forget(self, stream: Stream, connection: asyncio.StreamWriter | None) -> None:
        if self._streams.pop(stream.stream_id, None) is None or stream._finished or connection is None:
            return
        if not connection.is_closing():
            connection.write(encode_stream_ids([stream.stream_id]))


class Strangers:
    """Connections that have not sent their hello yet, at most `limit`. One more closes the oldest connection of the
    address that has the most. So silent connections cannot block others, and a flood from one address does not affect
    replicas at other addresses.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_address: dict[str, dict[asyncio.StreamWriter, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_address.values()))

    @contextmanager
    def holding(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Counts the connection as a stranger for as long as the context lasts."""
        if len(self) >= self._limit:
            most = max(self._by_address.values(), key=len)
            oldest = next(iter(most))
            oldest.transport.abort()
            self._drop(oldest)
        self._by_address.setdefault(_address(writer), {})[writer] = None
        try:
            yield
        finally:
            self._drop(writer)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        address = _address(writer)
        mine = self._by_address.get(address, {})
        mine.pop(writer, None)
        if not mine:
            self._by_address.pop(address, None)


def _address(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]) if peer else ""


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Detect within 30 s that the other machine no longer answers."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform != "linux":
        return  # these options have other names on other systems; only Linux runs clusters of several machines
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
