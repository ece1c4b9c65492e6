"""Opens the answer to a request for a marketplace slug: tries the endpoints of the slug in order until one begins to
answer. After that no other is tried, because the client has a part of the reply.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

from engines.interface.errors import AdapterError, EngineStopped, NonFiniteLogits, QueueFull
from serve_app.api.answer import Answer, Edge, FinishedAnswer
from serve_app.api.bodies.ignored_fields import IgnoredFields
from serve_app.api.opening import PARSE_US_PER_BYTE, Body, Operation, ParsedBody, open_again, parsed_body
from serve_app.api.record import RequestRecord
from serve_app.api.slugs.local_endpoints import NotServed, model_of, not_ready
from serve_app.api.slugs.relayed import RelayedAnswer
from serve_app.api.slugs.request import SlugRequest
from serve_app.api.ticket import Ticket
from serve_app.base.errors import (
    CheckpointError,
    FirstTokenTimeout,
    ImagesOverloaded,
    ImagesUnavailable,
    NoEndpoint,
    NoReplica,
    ReplicaLost,
    ReplyOverLimit,
    UpstreamFailed,
    UpstreamLost,
    UpstreamOverLimit,
    UpstreamRefused,
)
from serve_app.marketplace.choice import order
from serve_app.marketplace.outgoing import outgoing
from serve_app.marketplace.relay import Relay
from serve_app.marketplace.shared_health import SharedAttempt
from serve_app.marketplace.slugs import Endpoint, Slug
from serve_app.marketplace.upstream import Upstream

logger = logging.getLogger(__name__)

SlugAnswer = Answer | FinishedAnswer | RelayedAnswer
_Opened = AbstractAsyncContextManager[SlugAnswer]

_HELD_UP_PART = 0.1

_FAILURES: Final = (
    UpstreamFailed,
    NotServed,
    NoReplica,
    ReplicaLost,
    EngineStopped,
    AdapterError,
    NonFiniteLogits,
    CheckpointError,
)
"""The endpoint failed before its first byte: it cools down, and the next one is tried."""
_OVER_LIMIT: Final = (UpstreamOverLimit, FirstTokenTimeout)
"""The next endpoint is tried. This one cools down for the caller's key: its prompt may be the reason."""
_BUSY: Final = (QueueFull, ImagesOverloaded, ImagesUnavailable)
"""The next endpoint is tried, but this one does not cool down: one key that fills its queue would take it from all."""
_LOST: Final = (UpstreamLost, ReplicaLost, EngineStopped, NonFiniteLogits)
"""The endpoint failed after its first byte."""


@dataclass(frozen=True, slots=True)
class _Begun:
    endpoint: Endpoint
    attempt: SharedAttempt
    answer: SlugAnswer


@asynccontextmanager
async def open_slug(
    edge: Edge, ticket: Ticket, operation: Operation[Body], request: SlugRequest
) -> AsyncIterator[SlugAnswer]:
    """Raises what `open_request` raises for a fault of the caller, `UpstreamRefused`, or `NoEndpoint`."""
    slug = request.wanted.slug
    ticket.record.slug = slug.id
    down = await not_ready(edge, slug)
    key = ticket.caller.name

    def is_up(endpoint: Endpoint) -> bool:
        return endpoint.name not in down and endpoint.health.is_available_for(key)

    endpoints = order(request.wanted, request.price_options, request.cache_key, is_up)

    def opened(endpoint: Endpoint) -> _Opened:
        if endpoint.upstream is None:
            return _open_local(edge, ticket, operation, request, endpoint)
        return _open_remote(edge, ticket, operation.path, request, endpoint.upstream)

    async with AsyncExitStack() as stack:
        begun = await _first(ticket, slug, endpoints, opened, stack)
        began_at = time.monotonic()
        try:
            yield begun.answer
        except ReplyOverLimit:
            begun.attempt.exceeded()
            raise
        except _LOST:
            begun.attempt.failed()
            raise
        begun.attempt.finished()
        _measure(begun, ticket.record, time.monotonic() - began_at)


async def _first(
    ticket: Ticket,
    slug: Slug,
    endpoints: Sequence[Endpoint],
    opened: Callable[[Endpoint], _Opened],
    stack: AsyncExitStack,
) -> _Begun:
    """The first answer that begins; `stack` closes it. Raises `NoEndpoint`, and what is not the endpoint's failure."""
    for endpoint in endpoints:
        attempt = endpoint.health.begin(ticket.caller.name)
        if attempt is None:
            continue  # another request has just begun to probe it
        ticket.record.try_endpoint(slug.id, endpoint.name, endpoint.price)
        tried_at = time.monotonic()
        try:
            answer = await stack.enter_async_context(opened(endpoint))
        except UpstreamRefused:
            attempt.succeeded()
            raise
        except _OVER_LIMIT as exc:
            attempt.exceeded()
            _pass_over(ticket, exc)
        except _FAILURES as exc:
            attempt.failed(exc.retry_after_s if isinstance(exc, UpstreamFailed) else 0.0)
            _pass_over(ticket, exc)
        except _BUSY as exc:
            _pass_over(ticket, exc)
        else:
            attempt.succeeded()
            if answer.stream:
                endpoint.recent.saw_first_token(time.monotonic() - tried_at)
            return _Begun(endpoint, attempt, answer)
        finally:
            attempt.abandoned()
    failed = " and ".join(map(repr, ticket.record.passed_over))
    reason = f"{failed} failed" if failed else "one request at a time tries it again"
    raise NoEndpoint(f"No endpoint of {slug.id!r} answered now: {reason}.")


def _pass_over(ticket: Ticket, exc: Exception) -> None:
    """Undo what the endpoint was given of the request."""
    record = ticket.record
    logger.warning(
        "request_id=%s slug=%s endpoint=%s failed: %s: %s",
        record.request_id,
        record.slug,
        record.endpoint,
        type(exc).__name__,
        exc,
    )
    ticket.refund()
    ticket.hold_images(0)
    ticket.ignored_fields = IgnoredFields()
    record.pass_over()


def _measure(begun: _Begun, record: RequestRecord, within_s: float) -> None:
    """A client that reads slowly holds up its endpoint, so its reply says nothing about the endpoint's speed."""
    if begun.answer.stream and record.client_s <= _HELD_UP_PART * within_s:
        begun.endpoint.recent.saw_tokens(record.completion_tokens - 1, within_s)


@asynccontextmanager
async def _open_local(
    edge: Edge, ticket: Ticket, operation: Operation[Body], request: SlugRequest, endpoint: Endpoint
) -> AsyncIterator[Answer | FinishedAnswer]:
    """A reply that is not streamed is generated first: another endpoint can be tried as long as nothing was sent."""
    cost_us = len(request.content) * PARSE_US_PER_BYTE
    parsed = await edge.workers.run(cost_us, _parsed, operation, request, edge)
    ticket.ignored_fields = parsed.ignored_fields
    find = model_of(endpoint, request.requested, ticket.caller.name)
    async with open_again(edge, ticket, parsed.body, operation.prepare, find) as answer:
        yield answer if request.stream else FinishedAnswer(answer, await _whole(answer, ticket.record))


async def _whole(answer: Answer, record: RequestRecord) -> bytes:
    try:
        return await answer.whole()
    except asyncio.CancelledError:
        answer.note(record)  # a client that leaves pays for what was computed
        raise


def _parsed(operation: Operation[Body], request: SlugRequest, edge: Edge) -> ParsedBody[Body]:
    """The whole body, of which a slug reads a part only. Raises `InvalidRequest`."""
    return parsed_body(operation, request.raw, edge, operation.all_names)


@asynccontextmanager
async def _open_remote(
    edge: Edge, ticket: Ticket, path: str, request: SlugRequest, upstream: Upstream
) -> AsyncIterator[RelayedAnswer]:
    content = request.content
    ticket.record.about_remote(upstream.config.model, streamed=request.stream)
    bounds = request.bounds_at(upstream.config.tokens)
    asked = None if request.body.most_tokens is None else bounds.completion
    await ticket.reserve(bounds.guessed_prompt, asked, bounds.completion, most_prompt=bounds.prompt)
    cost_us = len(content) * PARSE_US_PER_BYTE
    body = await edge.workers.run(cost_us, outgoing, content, upstream.config, stream=request.stream)
    ticket.hold(len(body))
    relay = Relay(request.requested, bounds, wants_usage=request.include_usage, secret=upstream.secret)
    ticket.record.stages.called()
    async with upstream.open(path, body, stream=request.stream) as reply:
        ticket.record.began(None)
        yield RelayedAnswer(request.stream, reply, relay)
