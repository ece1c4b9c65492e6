"""READ THIS FIRST: `open_request` takes a parsed body to an answer whose first token has come, in one function.

`chat.py` and `completions.py` hold the differences between the two endpoints: each makes one `Prepared`. A request for
a marketplace slug goes through `slugs/opening.py` first, which comes here for endpoints that are served here.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from engines.interface.errors import AdapterChanged, EngineStopped
from engines.interface.protocol import GenerateRequest, TokenDelta
from serve_app.access.auth import Caller
from serve_app.api.answer import Answer, Edge, affinity_of
from serve_app.api.bodies.body_limits import check_sizes
from serve_app.api.bodies.ignored_fields import IgnoredFields, Known, ignored_fields
from serve_app.api.bodies.json_body import JsonObject, parse_object
from serve_app.api.replies.chunks import Chunks
from serve_app.api.replies.reply import Reply, ReplyPart
from serve_app.api.schema.sampling import SamplingFields, parse_body
from serve_app.api.schema.slug import SlugFields
from serve_app.api.slugs.request import SlugRequest, slug_request, wanted_slug
from serve_app.api.ticket import Ticket
from serve_app.api.tool_check import ToolCheck
from serve_app.base.errors import ReplicaLost
from serve_app.catalog.catalog import ResolvedModel
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
Find = Callable[[Edge], Awaitable[ResolvedModel]]
"""Finds the model that a request runs on, by the settings of an edge."""


@dataclass(frozen=True)
class Operation(Generic[Body]):
    """One of the two generating endpoints of the API. `path`: below the prefix, as also upstreams have it."""

    path: str
    body: type[Body]
    slug_body: type[SlugFields]
    prepare: Prepare[Body]

    @cached_property
    def names(self) -> Known:
        """The names of the fields that are read for models. They are the same for every request."""
        return self.body.names()

    @cached_property
    def all_names(self) -> Known:
        """The names of the fields that are read, for slugs or for models."""
        return {**self.slug_body.names(), **self.names}


@dataclass(frozen=True, slots=True)
class ParsedBody(Generic[Body]):
    """A body as the endpoint reads it, and the fields that it ignores."""

    body: Body
    ignored_fields: IgnoredFields


def parse_request(
    operation: Operation[Body], content: bytes, edge: Edge, ticket: Ticket
) -> ParsedBody[Body] | SlugRequest:
    """The record gets the requested model even when the rest of the body is refused. Raises `InvalidRequest`, or
    `ModelNotFound` for an endpoint that its slug does not have.
    """
    raw = parse_object(content, operation.all_names, longest_context=edge.catalog.longest_context)
    ticket.record.asked_for(raw.get("model"))
    wanted = wanted_slug(edge.marketplace, raw.get("model"), ticket.caller)
    if wanted is not None:
        return slug_request(wanted, operation.slug_body, raw, content)
    return parsed_body(operation, raw, edge, operation.names)


def parsed_body(operation: Operation[Body], raw: JsonObject, edge: Edge, read: Known) -> ParsedBody[Body]:
    """`read`: the fields that have an effect. Raises `InvalidRequest`."""
    check_sizes(raw, edge.limits, edge.catalog.longest_context)
    return ParsedBody(parse_body(operation.body, raw), ignored_fields(raw, read))


def requested_model(body: SamplingFields, caller: Caller) -> Find:
    """Finds the model that the caller asks for."""
    return lambda edge: edge.catalog.resolve(body.model, caller)


@asynccontextmanager
async def open_request(
    edge: Edge, ticket: Ticket, body: Body, prepare: Prepare[Body], find: Find
) -> AsyncIterator[Answer]:
    """Raises a `RequestError`, `LimitReached`, `RenderError`, `CheckpointError`, `EngineError` or `ServingError` before
    it yields.
    """
    stages = ticket.record.stages
    with stages.during("resolve"):
        target = await find(edge)
    ticket.record.about(target, streamed=bool(body.stream))
    prepared = await prepare(edge, ticket, body, target)
    generate = prepared.generate
    ticket.hold(_num_scores(generate, streamed=bool(body.stream)) * SCORE_BYTES)
    ticket.record.image_tokens = sum(image.length for image in generate.images)
    await ticket.reserve(len(generate.prompt_token_ids), prepared.asked_tokens, generate.sampling.max_tokens)
    affinity = affinity_of(prepared.prompt_cache_key, generate)
    async with edge.catalog.keep(target):
        deltas = edge.replicas.generate(target.deployment, generate, affinity=affinity)
        gaps = edge.gaps_of(target.model.id)
        stages.called()
        async with open_generation(deltas, edge.limits.first_token_timeout_s, gaps) as generation:
            ticket.record.began(generation.first.timing)
            yield Answer(
                stream=bool(body.stream),
                generation=generation,
                reply=prepared.reply,
                chunks=prepared.chunks,
                tool_check=prepared.tool_check,
                workers=edge.workers,
                preface=prepared.preface,
            )


@asynccontextmanager
async def open_again(
    edge: Edge, ticket: Ticket, body: Body, prepare: Prepare[Body], find: Find
) -> AsyncIterator[Answer]:
    """As `open_request`, a second time where another look can help."""
    async with AsyncExitStack() as stack:
        try:
            answer = await stack.enter_async_context(open_request(edge, ticket, body, prepare, find))
        except (AdapterChanged, EngineStopped, ReplicaLost):
            # The checkpoint was replaced just now, the replica began to drain, or it was lost. The caller has got
            # nothing yet, and another look finds the new content, another replica; by the configuration of now,
            # since the one that the request began with may be gone, its store of checkpoints closed.
            ticket.refund()
            answer = await stack.enter_async_context(open_request(edge.now(), ticket, body, prepare, find))
        yield answer


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
