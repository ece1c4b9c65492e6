"""Server-sent events from bytes, as they come."""

from typing import NamedTuple


class Event(NamedTuple):
    """The data of one event, and its name where it has one."""

    data: bytes
    name: bytes = b""
