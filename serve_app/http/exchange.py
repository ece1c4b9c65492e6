"""One HTTP exchange: the state that the middleware layers share, and the methods to answer it."""

import json
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from starlette.types import Message, Receive, Scope, Send

from serve_app.access.auth import Caller
from serve_app.api.bodies.ignored_fields import IgnoredFields
from serve_app.api.record import RequestRecord
from serve_app.api.ticket import Ticket
from serve_app.base.errors import HttpError

_MAX_FIELD_CHARACTERS = 64
_OWN_WORK_S = 0.01  # the most that a write takes while the client reads
_MAX_NAMES_BYTES = 2048  # of a header line; some servers and proxies take 8 KiB for all headers together


class ClientLeft(Exception):
    """The client closed the connection; no answer is possible."""


@dataclass(slots=True)
class Exchange:
    """Created by the outermost middleware; the inner layers fill it in."""

    scope: Scope
    receive: Receive
    send: Send
    record: RequestRecord
    started_at: float
    authenticated: Caller | None = None
    ticket: Ticket | None = None  # once it was admitted and its body was read
    response_started: bool = False
    response_ended: bool = False
    wrote_at: float = 0.0  # some of the body, by `time.monotonic`
    waits_for_client: bool = False  # to read; stays true when the wait timed out
    extra_headers: dict[str, str] = field(default_factory=dict)
    before_end: Callable[[], None] | None = None
    """What must happen, once, before the client can have the whole response."""

    @classmethod
    def of(cls, scope: Scope) -> "Exchange":
        exchange = scope["exchange"]
        assert isinstance(exchange, cls)
        return exchange

    @property
    def caller(self) -> Caller:
        """The key's holder. Use it only where a key is required."""
        assert self.authenticated is not None
        return self.authenticated

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name; the first of several."""
        return next(iter(self.headers(name)), None)

    def headers(self, name: bytes) -> list[str]:
        """All request headers of a lower-case name."""
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name]

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    async def send_json(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        await self.send_content(status, json.dumps(body, allow_nan=False, separators=(",", ":")).encode(), headers)

    async def send_content(self, status: int, content: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send JSON that is encoded already."""
        about = {"content-type": "application/json", "content-length": str(len(content))}
        await self.start(status, about | dict(headers or {}))
        await self.end(content)

    async def send_error(self, error: HttpError) -> None:
        await self.send_json(error.status, error.body(), error.headers)

    def write(self, content: bytes) -> Coroutine[Any, Any, None]:
        """Send some of the body."""
        return self._send_body({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes) -> None:
        """Send the last of the body."""
        self.response_ended = True
        self.finish()
        await self._send_body({"type": "http.response.body", "body": content})

    def finish(self) -> None:
        """Do `before_end`, unless that was done."""
        before_end, self.before_end = self.before_end, None
        if before_end is not None:
            before_end()

    async def _send_body(self, message: Message) -> None:
        self.waits_for_client = True
        began_at = self.wrote_at = time.monotonic()
        await self.send(message)
        took_s = time.monotonic() - began_at
        if took_s > _OWN_WORK_S:
            self.record.client_s += took_s
        self.waits_for_client = False

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status line and all headers, including those of every response."""
        common = {"x-request-id": self.record.request_id} | self.extra_headers
        if self.record.endpoint:
            common["x-endpoint"] = self.record.endpoint
        if self.record.adapter_digest:
            common["x-checkpoint-digest"] = self.record.adapter_digest
        if self.ticket is not None and self.ticket.ignored_fields.names:
            common["x-ignored-fields"] = _names(self.ticket.ignored_fields)
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in (common | dict(headers)).items()]
        self.response_started = True
        self.record.status = status
        message: Message = {"type": "http.response.start", "status": status, "headers": pairs}
        await self.send(message)


def _names(fields: IgnoredFields) -> str:
    """Names that callers chose, escaped for a header and bounded: the first ones, and the number of the rest."""
    shown: list[str] = []
    for name in fields.names:
        spelled = quote(name[:_MAX_FIELD_CHARACTERS], safe="._-[]")
        if sum(map(len, shown)) + 2 * len(shown) + len(spelled) > _MAX_NAMES_BYTES:
            break
        shown.append(spelled)
    more = fields.more + len(fields.names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")
