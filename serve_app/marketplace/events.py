"""Server-sent events from bytes, as they come.

The bytes may be cut anywhere. Lines end with LF, CRLF or CR. Comments, ids and unknown fields are dropped. Data that is
blank makes no event: some servers keep connections open with it.
"""

import re
from typing import Final, NamedTuple

MAX_EVENT_BYTES: Final = 4 << 20
_BOM: Final = b"\xef\xbb\xbf"
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_ONE_EVENT: Final = re.compile(rb"data: ([^\s][^\r\n]*)\n\n")  # as most pieces of a stream are


class EventTooLong(ValueError):
    """An event, or a line of one, is longer than the limit."""


class Event(NamedTuple):
    """The data of one event, and its name where it has one."""

    data: bytes
    name: bytes = b""


class Events:
    """Reads one stream. It holds at most one unfinished event, of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line: list[bytes] = []  # the pieces of an unfinished line
        self._data: list[bytes] = []
        self._name = b""
        self._line_bytes = 0
        self._event_bytes = 0  # of the unfinished event, without that line
        self._may_begin_with_lf = False
        self._is_first_line = True

    def feed(self, content: bytes) -> list[Event]:
        """The events that end in these bytes. Raises `EventTooLong`."""
        if self.is_between_events and len(content) <= self._max_bytes and (one := _ONE_EVENT.fullmatch(content)):
            return [Event(one[1])]
        if self._may_begin_with_lf and content.startswith(b"\n"):
            content = content[1:]  # the rest of a CRLF that was cut
            self._may_begin_with_lf = False
        if content:
            self._may_begin_with_lf = content.endswith(b"\r")
        lines = _LINE_END.split(content) if b"\r" in content else content.split(b"\n")
        rest = lines.pop()
        events: list[Event] = []
        for line in lines:
            self._take(self._whole(line), events)
        if rest:
            self._hold(rest)
        return events

    def finish(self) -> list[Event]:
        """The last event, if the stream ended without the blank line after it. Raises `EventTooLong`."""
        events: list[Event] = []
        for line in (self._whole(b""), b""):
            self._take(line, events)
        return events

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of an event is held, and the next byte begins a line."""
        return not (self._line or self._data or self._name or self._may_begin_with_lf or self._is_first_line)

    def _whole(self, end: bytes) -> bytes:
        """The line that ends here, with its pieces from before."""
        line = b"".join((*self._line, end)) if self._line else end
        self._line.clear()
        self._line_bytes = 0
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        return line

    def _hold(self, piece: bytes) -> None:
        if not (self._line and self._line[0].startswith(b":")):  # of a comment only the beginning is held
            self._line.append(piece)
            self._line_bytes += len(piece)
            self._check()

    def _take(self, line: bytes, events: list[Event]) -> None:
        if not line:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            if data and not data.isspace():
                events.append(Event(data, self._name))
            self._data.clear()
            self._name, self._event_bytes = b"", 0
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
            self._event_bytes += len(value) + 1
            self._check()
        elif field == b"event":
            self._name = value
            self._event_bytes += len(value)
            self._check()

    def _check(self) -> None:
        if self._event_bytes + self._line_bytes > self._max_bytes:
            raise EventTooLong(f"an event has more than {self._max_bytes} bytes")
