"""An answer in progress: a generation, the parser of its tokens, and the chunks that show them."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from engines.interface.protocol import GenerateRequest, TokenDelta
from serve_app.api.record import RequestRecord
from serve_app.api.replies.chunks import Chunks, ReplyHead
from serve_app.api.replies.reply import Reply, ReplyPart, WholeReply
from serve_app.api.replies.scores import Scored
from serve_app.api.requests import ReplyOptions
from serve_app.api.tool_check import ToolCheck
from serve_app.base.workers import Workers
from serve_app.catalog.catalog import Catalog, ResolvedModel
from serve_app.config.service import LimitsConfig
from serve_app.images.preparing import Images
from serve_app.marketplace.slugs import Marketplace
from serve_app.replicas.generation import Generation, Replicas
from serve_app.replicas.token_gaps import TokenGaps

US_PER_SCORE = 3.0  # a log-probability of a token, or of an alternative
_AFFINITY_TOKENS = 64  # enough to tell conversations apart by their beginning


@dataclass(frozen=True, slots=True)
class Edge:
    """What a request needs: the catalogue, slugs and limits of one configuration, the replicas, the image
    preprocessing, and threads. `now`: the same by the configuration of now. `gaps_of`: where a model's tokens count.
    """

    catalog: Catalog
    marketplace: Marketplace
    limits: LimitsConfig
    replicas: Replicas
    workers: Workers
    now: Callable[[], "Edge"]
    gaps_of: Callable[[str], TokenGaps]
    images: Images | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer whose first token has come. Read the rest with `parts` or `whole`, once. `preface` makes a part that
    comes before the engine's first.

    Both raise what the engine raises, and `ReplyRefused`.
    """

    stream: bool
    generation: Generation
    reply: Reply
    chunks: Chunks
    tool_check: ToolCheck
    workers: Workers
    preface: Callable[[TokenDelta], ReplyPart] | None = None

    async def parts(self) -> AsyncGenerator[ReplyPart, None]:
        """The reply as it is generated. The caller closes it."""
        async with aclosing(self._unchecked()) as parts:
            async for part in parts:
                for call in part.tool_calls:
                    self.tool_check.see(call)
                if part.finish_reason is not None:
                    self.tool_check.finish(self.reply.end_reason, malformed=self.reply.malformed)
                yield part

    async def shown(self, part: ReplyPart) -> bytes:
        """The events of a part that may be long."""
        return await self.workers.run(_scores_us(part.scored), self.chunks.part, part)

    async def whole(self) -> bytes:
        """The reply as one body."""
        reply = WholeReply()
        async with aclosing(self._unchecked()) as parts:
            async for part in parts:
                await self.workers.run(_scores_us(part.scored), reply.add, part)
        self.reply.correct(reply)
        for call in reply.tool_calls:
            self.tool_check.see(call)
        self.tool_check.finish(self.reply.end_reason, malformed=self.reply.malformed)
        return await self.workers.run(
            reply.scored.num_values * US_PER_SCORE, self.chunks.whole, reply, self.reply.usage
        )

    def note(self, record: RequestRecord) -> None:
        """Note the reply's progress."""
        record.count(self.reply)

    async def _unchecked(self) -> AsyncGenerator[ReplyPart, None]:
        delta = self.generation.first
        if self.preface is not None:
            cost_us = len(delta.prompt_logprobs) * US_PER_SCORE
            yield await self.workers.run(cost_us, self.preface, delta)
        while True:
            part = self.reply.feed(delta)
            if part.finish_reason is not None:
                await self.generation.close()  # before the last part is sent: the client may read slowly
                yield part
                return
            yield part
            delta = await self.generation.next()


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer whose reply is there in one piece, before any of it was sent."""

    answer: Answer
    content: bytes
    stream: Literal[False] = False

    async def whole(self) -> bytes:
        return self.content

    def note(self, record: RequestRecord) -> None:
        self.answer.note(record)


def _scores_us(scored: Sequence[Scored]) -> float:
    """Rough cost of writing log-probabilities as JSON."""
    alternatives = len(scored[-1].logprob.top) if scored and scored[-1].logprob is not None else 0
    return len(scored) * (1 + alternatives) * US_PER_SCORE


def new_head(
    prefix: str, target: ResolvedModel, options: ReplyOptions, prompt_token_ids: tuple[int, ...] | None
) -> ReplyHead:
    """A head with a new id, which is a part of the engine's too: ids that callers choose may repeat."""
    return ReplyHead(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), target.requested, options, prompt_token_ids)


def affinity_of(cache_key: str, request: GenerateRequest) -> str:
    """A key that is equal for requests that should share a replica's prefix cache: the caller's cache key, else the
    start of the prompt.
    """
    if cache_key:
        return f"key:{cache_key}"
    beginning = repr(request.prompt_token_ids[:_AFFINITY_TOKENS])
    return "prompt:" + blake2b(beginning.encode(), digest_size=16).hexdigest()
