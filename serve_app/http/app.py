"""The HTTP application: one short handler per endpoint, built from a `Service`. It imports neither Ray nor torch."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.access.auth import Caller
from serve_app.api.answer import Answer, Edge, FinishedAnswer
from serve_app.api.chat import CHATS
from serve_app.api.completions import COMPLETIONS
from serve_app.api.loading import load_everywhere
from serve_app.api.model_listing import describe, list_checkpoints, list_endpoints, list_models
from serve_app.api.opening import (
    PARSE_US_PER_BYTE,
    Body,
    Operation,
    ParsedBody,
    open_again,
    parse_request,
    requested_model,
)
from serve_app.api.slugs.opening import SlugAnswer, open_slug
from serve_app.api.slugs.request import SlugRequest, wanted_slug
from serve_app.api.ticket import Ticket
from serve_app.base.errors import (
    ClientTooSlow,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    NotReady,
    TotalTimeout,
)
from serve_app.base.model_id import names_checkpoint, parse
from serve_app.catalog.loading import LOADING
from serve_app.config.service import LimitsConfig
from serve_app.http.body import read_body
from serve_app.http.disconnect import CancelOnDisconnect
from serve_app.http.exchange import ClientLeft, Exchange
from serve_app.http.middleware import LIVENESS_PATHS, layers
from serve_app.http.openapi import DESCRIBE_US, VERSION, describe_api
from serve_app.http.service import Service
from serve_app.http.sse import send_answer, send_relayed
from serve_app.http.usage import Questions, send_usage

logger = logging.getLogger(__name__)

PREFIXES = ("/v1", "/services/tinker-prod/oai/api/v1")
METRICS_PATH = "/metrics"
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus' text format
_ENDPOINTS = ("/chat/completions", "/completions", "/models", "/usage")  # what ends in two of them means the first

Handler = Callable[[Exchange], Awaitable[None]]


def build_http_app(service: Service) -> Starlette:
    """An ASGI application over the service. The caller closes the service."""
    handlers = Handlers(service)
    routes = [
        *(_route("GET", path, handlers.healthz) for path in LIVENESS_PATHS),
        _route("GET", "/version", handlers.version),
        _route("GET", "/readyz", handlers.readyz),
        _route("GET", "/openapi.json", handlers.openapi),
        _route("GET", METRICS_PATH, handlers.metrics),
    ]
    for prefix in PREFIXES:
        routes += [
            _route("POST", f"{prefix}/chat/completions", handlers.chat),
            _route("POST", f"{prefix}/completions", handlers.completions),
            _route("GET", f"{prefix}/usage", handlers.usage),
            _route("GET", f"{prefix}/models", handlers.models),
            _route("GET", f"{prefix}/models/{{slug:path}}/endpoints", handlers.endpoints),
            _route("POST", f"{prefix}/models/{{id:path}}/load", handlers.load),
            _route("GET", f"{prefix}/models/{{id:path}}", handlers.model),
        ]
    app = Starlette(routes=routes, middleware=layers(service), exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    return app


class Handlers:
    """The endpoints. `middleware.Catch` turns their exceptions into responses."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._why_not_ready: Mapping[str, str] = {}
        self._described: tuple[LimitsConfig, bytes] | None = None
        self._questions = Questions()

    async def healthz(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"status": "ok"})

    async def version(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"version": VERSION})

    async def readyz(self, exchange: Exchange) -> None:
        settings = self._service.settings
        apps = settings.catalog.apps
        if not apps and not settings.marketplace.slugs:
            raise NotReady("Not ready: nothing is served.")
        reasons = await self._service.replicas.readiness(set(apps.values()))
        why_not = {name: reason for name, app in apps.items() if (reason := reasons[app])}
        why_not |= {name: LOADING for name in apps if name not in settings.catalog.models}
        self._log_change(why_not)
        if why_not:
            raise NotReady(f"Not ready: {len(why_not)} of {len(apps)} models.")
        refused = list(dict.fromkeys(refusal.part or "user_config" for refusal in self._service.refusals))
        details = {"config_errors": refused} if refused else {}
        await exchange.send_json(200, {"status": "ready", **details})

    def _log_change(self, why_not: Mapping[str, str]) -> None:
        """Log changes of readiness. Names and reasons go only to the log, because /readyz needs no key."""
        if why_not != self._why_not_ready:
            logger.info("Readiness: %s", why_not or "all models are ready")
            self._why_not_ready = why_not

    async def openapi(self, exchange: Exchange) -> None:
        limits = self._service.settings.limits
        if self._described is None or self._described[0] != limits:
            self._described = limits, await self._service.workers.run(DESCRIBE_US, describe_api, limits)
        await exchange.send_content(200, self._described[1])

    async def metrics(self, exchange: Exchange) -> None:
        if not exchange.caller.reads_metrics or self._service.read_metrics is None:
            raise NotFound(f"There is no path {METRICS_PATH!r} for this key.")
        content = await self._service.read_metrics()
        await exchange.send_content(200, content, {"content-type": _METRICS_TYPE})

    async def models(self, exchange: Exchange) -> None:
        query = parse_qs(exchange.scope["query_string"].decode("latin-1"))
        if query.get("checkpoints", [""])[0] not in ("1", "true"):
            await exchange.send_json(200, await list_models(self._edge(), exchange.caller))
            return
        with self._admitted(exchange.caller):
            listing = await list_checkpoints(self._edge(), exchange.caller, query.get("after", [None])[0])
        await exchange.send_json(200, listing)

    async def model(self, exchange: Exchange) -> None:
        await self._describe(exchange, exchange.scope["path_params"]["id"])

    async def load(self, exchange: Exchange) -> None:
        requested: str = exchange.scope["path_params"]["id"]
        exchange.record.asked_for(requested)
        with self._admitted(exchange.caller):
            async with CancelOnDisconnect(exchange):
                loads = await load_everywhere(self._edge(), exchange.caller, exchange.record, requested)
        await exchange.send_json(200, loads)

    async def endpoints(self, exchange: Exchange) -> None:
        slug: str = exchange.scope["path_params"]["slug"]
        edge = self._edge()
        wanted = wanted_slug(edge.marketplace, slug, exchange.caller)
        if wanted is not None:
            exchange.record.asked_for(slug)
            await exchange.send_json(200, await list_endpoints(edge, wanted, exchange.caller))
            return
        requested = f"{slug}/endpoints"  # a model id may contain slashes
        try:
            await self._describe(exchange, requested)
        except (InvalidRequest, ModelNotFound) as exc:
            if isinstance(exc, ModelNotFound) and parse(requested).checkpoint is not None:
                raise
            raise NotFound(f"There is no marketplace slug {slug!r}.") from exc

    async def _describe(self, exchange: Exchange, requested: str) -> None:
        exchange.record.asked_for(requested)
        with self._admitted(exchange.caller) if names_checkpoint(requested) else nullcontext():
            description = await describe(self._edge(), requested, exchange.caller)
        await exchange.send_json(200, description)

    @contextmanager
    def _admitted(self, caller: Caller) -> Iterator[None]:
        """Looking into a store of checkpoints counts as a request. Raises `LimitReached` or `Overloaded`."""
        with self._service.capacity.admit(), self._service.limiter.admit(caller):
            yield

    async def chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, CHATS)

    async def completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, COMPLETIONS)

    async def _generate(self, exchange: Exchange, operation: Operation[Body]) -> None:
        edge = self._edge()
        limits, service = edge.limits, self._service
        exchange.before_end = partial(self._book, exchange)
        service.budgets.check(exchange.caller)
        with service.capacity.admit():
            await service.shared_limits.hear_before_refusing(exchange.caller)
            with service.limiter.admit(exchange.caller, bytes_in_flight=limits.bytes_in_flight) as lease:
                ticket = exchange.ticket = Ticket(
                    exchange.caller, lease, exchange.record, service.budgets, limits.total_timeout_s
                )
                request = await self._parse(exchange, edge, ticket, operation)
                with _charged(exchange, ticket):
                    async with CancelOnDisconnect(exchange), _time_limit(exchange, limits):
                        await self._answer(exchange, self._open(edge, ticket, operation, request))

    async def _parse(
        self, exchange: Exchange, edge: Edge, ticket: Ticket, operation: Operation[Body]
    ) -> ParsedBody[Body] | SlugRequest:
        """Parse the body. Fields that are not read are dropped, unless an endpoint of a slug may read them."""
        during = ticket.record.stages.during
        with during("receive"):
            content = await read_body(exchange, edge.limits, ticket.lease.hold)
        ticket.body_bytes = len(content)
        cost_us = len(content) * PARSE_US_PER_BYTE
        with during("parse"):
            return await edge.workers.run(cost_us, parse_request, operation, content, edge, ticket)

    def _open(
        self, edge: Edge, ticket: Ticket, operation: Operation[Body], request: ParsedBody[Body] | SlugRequest
    ) -> AbstractAsyncContextManager[SlugAnswer]:
        if isinstance(request, SlugRequest):
            return open_slug(edge, ticket, operation, request)
        ticket.ignored_fields = request.ignored_fields
        return open_again(edge, ticket, request.body, operation.prepare, requested_model(request.body, ticket.caller))

    async def _answer(self, exchange: Exchange, opened: AbstractAsyncContextManager[SlugAnswer]) -> None:
        """What generates is closed before the last bytes are sent: the client may read slowly, or leave with them."""
        async with opened as answer:
            exchange.record.first_token_s = exchange.elapsed_s()
            try:
                last = await self._send(exchange, answer)
            finally:
                answer.note(exchange.record)
                exchange.record.stages.end()
        if answer.stream:
            await exchange.end(last)
        else:
            await exchange.send_content(200, last)

    def _book(self, exchange: Exchange) -> None:
        exchange.record.duration_s = exchange.elapsed_s()
        self._service.book(exchange.record)

    async def usage(self, exchange: Exchange) -> None:
        """Counts as a request of the key, but not for its budget: who has spent it may see that."""
        service, caller = self._service, exchange.caller
        with service.capacity.admit(), service.limiter.admit(caller), self._questions.admit(caller.name):
            await send_usage(exchange, service.ledger)

    def _edge(self) -> Edge:
        service, settings = self._service, self._service.settings
        return Edge(
            settings.catalog,
            settings.marketplace,
            settings.limits,
            service.replicas,
            service.workers,
            self._edge,
            service.recorder.gaps_of,
            settings.images,
        )

    async def _send(self, exchange: Exchange, answer: SlugAnswer) -> bytes:
        """Send a stream but for its last events; returns what is left to send."""
        if isinstance(answer, FinishedAnswer) or not answer.stream:
            return await answer.whole()
        if isinstance(answer, Answer):
            return await send_answer(exchange, answer, self._service.keep_alive_s)
        return await send_relayed(exchange, answer, self._service.keep_alive_s)


class _Endpoint:
    """A handler as an ASGI application: Starlette routes accept these besides functions of its own requests."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(Exchange.of(scope))


def _route(method: str, path: str, handler: Handler) -> Route:
    return Route(path, _Endpoint(handler), methods=[method])


async def _no_route(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    exchange = Exchange.of(request.scope)
    method, path = request.scope["method"], request.scope["path"]
    if exc.status_code == 405:
        allowed = (exc.headers or {}).get("Allow", "")
        exchange.extra_headers["allow"] = ", ".join(sorted(allowed.split(", ")))
        raise MethodNotAllowed(f"The path {path!r} does not take the method {method}.") from exc
    raise NotFound(f"There is no path {path!r}. {_instead_of(path)}") from exc


def _instead_of(path: str) -> str:
    """A suggestion. The usual mistake is a base URL without the prefix, or with a part of it twice."""
    meant = next((end for end in _ENDPOINTS if path.rstrip("/").endswith(end)), None)
    if meant is not None:
        return f"Did you mean {PREFIXES[0] + meant!r}?"
    return f"The endpoints are {', '.join(PREFIXES[0] + end for end in _ENDPOINTS)}."


@contextmanager
def _charged(exchange: Exchange, ticket: Ticket) -> Iterator[None]:
    """Charge the used tokens at the end. A request that failed or was refused without output is free. A client that
    left before the first token pays for the prompt, because the engine computed it.
    """
    try:
        yield
    except ClientLeft:
        raise
    except Exception:
        if exchange.record.first_token_s is None:
            ticket.refund()
        raise
    finally:
        ticket.settle()


@asynccontextmanager
async def _time_limit(exchange: Exchange, limits: LimitsConfig) -> AsyncIterator[None]:
    """Raises `TotalTimeout` when its body takes longer, or `ClientTooSlow` when it is then waiting for the client."""
    seconds = limits.total_timeout_s
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError as exc:
        if not limit.expired():
            raise
        if exchange.waits_for_client:
            raise ClientTooSlow(f"The client reads too slowly: the reply was not read within {seconds:g} s.") from exc
        raise TotalTimeout(f"The request took longer than {seconds:g} s.") from exc
