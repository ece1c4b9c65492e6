"""A client of one remote OpenAI-compatible API."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from serve_app.config.marketplace import UpstreamConfig
from serve_app.marketplace.events import Event


class UpstreamReply:
    """A reply that has begun. Read it to its end, or leave `Upstream.open`, which closes its connection."""

    @property
    def content(self) -> bytes:
        """A whole reply: a JSON object. Only for `stream=False`."""
        raise NotImplementedError

    async def read(self) -> Sequence[Event]:
        """The events that came, at least one, the `[DONE]` included; none after the last one. Only for `stream=True`.
        Waits for the upstream, and reads no more from it than it is called for. Raises `UpstreamLost`.
        """
        raise NotImplementedError


class Upstream:
    """Owns the pooled connections to it, in the event loop of its requests; `close` it."""

    def __init__(self, config: UpstreamConfig, key: str | None = None) -> None:
        """`key`: sent as a bearer token."""
        self.config = config
        self.key = key

    @asynccontextmanager
    async def open(self, path: str, body: bytes, *, stream: bool) -> AsyncIterator[UpstreamReply]:
        """Ask it. `path`: `/completions` or `/chat/completions`; `body`: of `outgoing`. Enters once the first event, or
        the whole reply, is there. Raises `UpstreamFailed`, and `UpstreamRefused` where the caller is at fault.
        """
        yield UpstreamReply()

    async def close(self) -> None:
        """Close the idle connections now, and each of the others at the end of its reply."""
