"""An answer of a remote endpoint in progress: the upstream's reply, and what the client gets of it."""

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from serve_app.api.record import RequestRecord
from serve_app.base.errors import UpstreamLost
from serve_app.marketplace.events import Event
from serve_app.marketplace.flow import started
from serve_app.marketplace.relay import Relay
from serve_app.marketplace.upstream import UpstreamReply, Write

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RelayedAnswer:
    """An answer that has begun. Send it with `pass_on` and then `end`, or with `whole`, once. The first two raise
    `UpstreamLost`.
    """

    stream: bool
    reply: UpstreamReply
    relay: Relay

    async def pass_on(self, write: Write) -> None:
        """Write the events as they come, all but the last ones. What comes while `write` does not wait for the client
        is written without a turn of the event loop.
        """

        def take(events: Sequence[Event]) -> Awaitable[None] | None:
            return started(self._write(events, write))

        while events := await self.reply.read():
            await self._write(events, write)
            await self.reply.flow(self.relay.again, write, take)

    async def _write(self, events: Sequence[Event], write: Write) -> None:
        pieces: list[bytes] = []
        try:
            for event in events:
                pieces.append(self.relay.pass_on((event,)))
        except UpstreamLost:
            await write(b"".join(pieces))  # what came before the failure, in the same packet
            raise
        if content := b"".join(pieces):
            await write(content)

    def end(self) -> bytes:
        """The last events."""
        return self.relay.end()

    async def whole(self) -> bytes:
        """The reply as one body."""
        return self.relay.whole(self.reply.content)

    def note(self, record: RequestRecord) -> None:
        """Note the reply's progress."""
        used = self.relay.used
        if self.relay.is_doubtful:
            logger.warning(
                "request_id=%s slug=%s endpoint=%s reports more tokens than there can be: %s; counted: %s",
                record.request_id,
                record.slug,
                record.endpoint,
                self.relay.told,
                used,
            )
        record.prompt_tokens = used.prompt
        record.cached_tokens = used.cached
        record.completion_tokens = used.completion
        record.reasoning_tokens = used.reasoning
        record.is_estimated = used.is_estimated
        record.finish_reason = self.relay.finish_reason
