"""The replica's end of the side channel (`listener.py`): one connection per ingress, one frame per engine step."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from engines.interface.errors import EngineError, RequestRefused
from engines.interface.protocol import Engine, GenerateRequest, Output, TokenDelta
from serve_app.base.errors import ReplicaLost
from serve_app.replicas.channel.frames import (
    MAX_FRAME_BYTES,
    decode_stream_ids,
    encode_event,
    encode_frame,
    encode_hello,
    encode_status,
    read_frame,
)
from serve_app.replicas.channel.listener import BROKEN, Endpoint, keep_alive
from serve_app.replicas.status import Status

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Limits on what a replica sends and buffers for one ingress."""

    max_entry_bytes: int = MAX_FRAME_BYTES // 2  # so that a frame may always be filled up to there and take one more
    max_unsent_bytes: int = 2 * MAX_FRAME_BYTES  # for an ingress that does not read


LINK_LIMITS = LinkLimits()


class Link:
    """The replica's end of one connection: takes a step's outputs and writes them as one frame.

    A lost link ends all its streams: the futures of `attach` complete, and their waiters abort the requests.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: LinkLimits) -> None:
        self._writer = writer
        self._limits = limits
        self._streams: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._request_ids: dict[int, str] = {}
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    @property
    def is_lost(self) -> bool:
        return self._reading.done() or self._writer.is_closing()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def attach(self, request_id: str, stream_id: int) -> asyncio.Future[None]:
        """Tell the ingress that this replica has the request. The future completes when nothing more can be sent: the
        last output was sent, the stream is no longer read, or the link is lost.
        """
        over = asyncio.get_running_loop().create_future()
        self._streams[request_id] = (stream_id, over)
        self._request_ids[stream_id] = request_id
        self._write([encode_event(stream_id, None)])
        if self.is_lost:
            over.set_result(None)
        return over

    def attached(self, stream_id: int) -> asyncio.Future[None] | None:
        """The future of `attach` for the stream; None if no request is attached to it."""
        request_id = self._request_ids.get(stream_id)
        return None if request_id is None else self._streams[request_id][1]

    def detach(self, request_id: str) -> None:
        stream_id, over = self._streams.pop(request_id)
        del self._request_ids[stream_id]
        over.cancel()

    def deliver(self, outputs: Sequence[Output]) -> None:
        """One step's outputs (`protocol.OutputSink`). Outputs of requests that are not attached are dropped."""
        entries = []
        for output in outputs:
            if output.request_id not in self._streams:
                continue
            stream_id, over = self._streams[output.request_id]
            event = output.event
            entry = encode_event(stream_id, event)
            is_last = not isinstance(event, TokenDelta) or event.finish_reason is not None
            if len(entry) > self._limits.max_entry_bytes:
                limit = self._limits.max_entry_bytes
                what = f"The log-probabilities of one step take {len(entry)} bytes, at most {limit} can be sent."
                entry, is_last = encode_event(stream_id, RequestRefused("logprobs", what)), True
            entries.append(entry)
            if is_last and not over.done():
                over.set_result(None)
        self._write(entries)

    def tell(self, status: Status) -> None:
        """Tell the ingress about this replica."""
        self._send([encode_status(status)])

    async def close(self) -> None:
        """Send the remaining outputs and close the connection."""
        self._writer.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    def _write(self, entries: Sequence[bytes]) -> None:
        frame: list[bytes] = []
        size = 0
        for entry in entries:
            if size + len(entry) > self._limits.max_entry_bytes:
                self._send(frame)
                frame, size = [], 0
            frame.append(entry)
            size += len(entry)
        self._send(frame)

    def _send(self, entries: Sequence[bytes]) -> None:
        if not entries or self._writer.is_closing():
            return
        self._writer.write(encode_frame(entries))
        unsent = self._writer.transport.get_write_buffer_size()
        if unsent > self._limits.max_unsent_bytes:
            logger.error("side channel: an ingress does not read; %d bytes are unsent, its streams end", unsent)
            self._writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                for stream_id in decode_stream_ids(await read_frame(reader, MAX_FRAME_BYTES)):
                    request_id = self._request_ids.get(stream_id)
                    if request_id is not None:
                        self._end(request_id)
        except BROKEN as exc:
            logger.info("side channel: the connection to an ingress was lost: %s", exc or type(exc).__name__)
        finally:
            self._writer.close()
            for request_id in self._streams:
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        _, over = self._streams[request_id]
        if not over.done():
            over.set_result(None)


class Links:
    """The replica's connections, one per ingress, made when first needed and again after a loss."""

    def __init__(self, limits: LinkLimits = LINK_LIMITS) -> None:
        self._limits = limits
        self._links: dict[Endpoint, asyncio.Task[Link]] = {}

    @property
    def open_streams(self) -> int:
        return sum(task.result().open_streams for task in self._links.values() if _is_link(task))

    async def to(self, endpoint: Endpoint) -> Link:
        """A connected link. Raises `ReplicaLost` when the ingress cannot be reached."""
        self._drop_lost()
        task = self._links.get(endpoint)
        if task is None:
            task = self._links[endpoint] = asyncio.get_running_loop().create_task(_connect(endpoint, self._limits))
        # Shielded: several requests wait for one connection, and one of them may be cancelled.
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._links.values():
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        await asyncio.gather(*(task.result().close() for task in self._links.values() if _is_link(task)))
        self._links.clear()

    def _drop_lost(self) -> None:
        for endpoint, task in list(self._links.items()):
            if task.done() and not (_is_link(task) and not task.result().is_lost):
                del self._links[endpoint]


def _is_link(task: asyncio.Task[Link]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _connect(endpoint: Endpoint, limits: LinkLimits) -> Link:
    try:
        opening = asyncio.open_connection(endpoint.host, endpoint.port)
        reader, writer = await asyncio.wait_for(opening, CONNECT_TIMEOUT_S)
    except (OSError, TimeoutError) as exc:
        logger.error("side channel: the ingress at %s:%d cannot be reached: %r", endpoint.host, endpoint.port, exc)
        raise ReplicaLost("The replica cannot reach the ingress.") from exc
    keep_alive(writer)
    writer.write(encode_hello(endpoint.token))
    return Link(reader, writer, limits)


async def run_request(engine: Engine, request: GenerateRequest, link: Link, stream_id: int) -> None:
    """Generate for one stream of an ingress; returns when nothing more is to be sent. Cancel it to stop generating.

    The replica assigns the request's id, because ids from clients may repeat. If this replica already generates for the
    stream, it does not generate twice: Serve may repeat a call whose state it lost.
    """
    before = link.attached(stream_id)
    if before is not None:
        await asyncio.wait([before])
        return
    over = link.attach(request.request_id, stream_id)
    try:
        engine.submit(request, link)
        await over
    except EngineError as exc:
        link.deliver([Output(request.request_id, exc)])
    finally:
        engine.abort(request.request_id)
        link.detach(request.request_id)
