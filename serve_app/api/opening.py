"""READ THIS FIRST: `open_request` takes a parsed body to an answer whose first token has come, in one function.

`chat.py` and `completions.py` hold the differences between the two endpoints: each makes one `Prepared`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from engines.protocol import GenerateRequest, TokenDelta
from serve_app.api.answer import Answer, Edge, affinity_of
from serve_app.api.body_limits import check_sizes
from serve_app.api.chunks import Chunks
from serve_app.api.ignored_fields import IgnoredFields, ignored_fields
from serve_app.api.json_body import parse_object
from serve_app.api.record import RequestRecord
from serve_app.api.reply import Reply, ReplyPart
from serve_app.api.schema.sampling import SamplingFields, parse_body
from serve_app.api.ticket import Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.catalog.catalog import ResolvedModel
from serve_app.config.service import LimitsConfig
from serve_app.replicas.generation import open_generation


@dataclass(frozen=True, slots=True)
class Prepared:
    """The engine's request, and how its tokens become a reply. `asked_tokens`: `max_tokens` if the caller set it.
    `preface` makes a part that comes before the engine's first.
    """

    generate: GenerateRequest
    asked_tokens: int | None
    prompt_cache_key: str
    reply: Reply
    chunks: Chunks
    tool_check: ToolCheck
    preface: Callable[[TokenDelta], ReplyPart] | None = None


PARSE_US_PER_BYTE = 1 / 8
SCORE_BYTES = 80  # of a log-probability as JSON
Body = TypeVar("Body", bound=SamplingFields)
Prepare = Callable[[Edge, Ticket, Body, ResolvedModel], Awaitable[Prepared]]


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[Body]):
    """A body as the endpoint reads it, and the fields that it ignores."""

    body: Body
    ignored_fields: IgnoredFields


def parse_request(
    kind: type[Body], content: bytes, limits: LimitsConfig, longest_context: int, record: RequestRecord
) -> ParsedBody[Body]:
    """`record` gets the requested model even when the rest of the body is refused. Raises `InvalidRequest`."""
    names = kind.names()
    raw = parse_object(content, names, longest_context=longest_context)
    record.asked_for(raw.get("model"))
    check_sizes(raw, limits, longest_context)
    return ParsedBody(parse_body(kind, raw), ignored_fields(raw, names))


@asynccontextmanager
async def open_request(edge: Edge, ticket: Ticket, body: Body, prepare: Prepare[Body]) -> AsyncIterator[Answer]:
    """Raises a `RequestError`, `LimitReached`, `RenderError`, `CheckpointError`, `EngineError` or `ServingError` before
    it yields.
    """
    target = await edge.catalog.resolve(body.model, ticket.caller)
    ticket.record.about(target, streamed=bool(body.stream))
    prepared = await prepare(edge, ticket, body, target)
    generate = prepared.generate
    ticket.hold(_num_scores(generate, streamed=bool(body.stream)) * SCORE_BYTES)
    ticket.record.image_tokens = sum(image.length for image in generate.images)
    await ticket.reserve(len(generate.prompt_token_ids), prepared.asked_tokens, generate.sampling.max_tokens)
    affinity = affinity_of(prepared.prompt_cache_key, generate)
    deltas = edge.replicas.generate(target.deployment, generate, affinity=affinity)
    async with open_generation(deltas, edge.limits.first_token_timeout_s) as generation:
        yield Answer(
            stream=bool(body.stream),
            generation=generation,
            reply=prepared.reply,
            chunks=prepared.chunks,
            tool_check=prepared.tool_check,
            workers=edge.workers,
            preface=prepared.preface,
        )


def _num_scores(request: GenerateRequest, *, streamed: bool) -> int:
    """How many log-probabilities are held at a time, alternatives included. The prompt's arrive together; a reply that
    is not streamed is kept whole.
    """
    sampling, count = request.sampling, 0
    if sampling.logprobs is not None and not streamed:
        count += sampling.max_tokens * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        count += len(request.prompt_token_ids) * (1 + sampling.prompt_logprobs)
    return count
