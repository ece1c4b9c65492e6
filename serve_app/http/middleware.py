"""Pure ASGI middleware. `layers` is the whole list, outermost first.

All but the first pass on anything that is not HTTP. They share the request's `Exchange`, at `scope["exchange"]`.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import quote

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_app.api.record import Outcome, Recorder, RequestRecord
from serve_app.base.errors import ClientTooSlow, ConfigRefused, HttpError, NotFound, NotReady, to_http
from serve_app.base.logs import log_request, trace_of
from serve_app.http.early_answer import EarlyAnswer
from serve_app.http.exchange import ClientLeft, Exchange
from serve_app.http.service import Service
from serve_app.http.sse import send_failure

logger = logging.getLogger(__name__)

LIVENESS_PATHS = ("/healthz", "/health", "/ping")  # the others are probe paths of other servers
PROBE_PATHS = frozenset({*LIVENESS_PATHS, "/readyz"})
OPEN_PATHS = frozenset({*PROBE_PATHS, "/version", "/openapi.json"})
_MAX_QUOTED_CHARACTERS = 1024
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def layers(service: Service) -> list[Middleware]:
    return [
        Middleware(RefuseWebSockets),
        Middleware(EarlyAnswer),
        Middleware(Identify),
        Middleware(Record, recorder=service.recorder),
        Middleware(Catch),
        Middleware(Authenticate, service=service),
    ]


class RefuseWebSockets:
    """Refuses WebSockets with the service's error body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket" or "websocket.http.response" not in scope.get("extensions", {}):
            await self._app(scope, receive, send)
            return
        error = to_http(NotFound("WebSockets are not supported; send requests over HTTP."))
        content = json.dumps(error.body()).encode()
        headers = {
            "x-request-id": uuid.uuid4().hex,
            "content-type": "application/json",
            "content-length": str(len(content)),
        }
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "websocket.http.response.start", "status": error.status, "headers": pairs})
        await send({"type": "websocket.http.response.body", "body": content})


class Identify:
    """Opens the exchange and gives the request an id: the client's own if it is valid."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            record = RequestRecord("", scope["method"], scope["path"], is_probe=scope["path"] in PROBE_PATHS)
            exchange = Exchange(scope, receive, send, record, time.monotonic())
            record.started_at = exchange.started_at
            asked = exchange.header(b"x-request-id") or ""
            record.request_id = asked if _SANE_ID.fullmatch(asked) else uuid.uuid4().hex
            record.traceparent = exchange.header(b"traceparent") or ""
            log_request(record.request_id)
            scope["exchange"] = exchange
        await self._app(scope, receive, send)


class Record:
    """Counts and logs every request once, when it has ended."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        record = exchange.record
        self._recorder.request_started(record)
        try:
            await self._app(scope, receive, send)
        except BaseException:
            record.outcome = Outcome.LEFT
            raise
        finally:
            exchange.finish()
            record.stages.end()
            record.duration_s = exchange.elapsed_s()
            self._recorder.request_ended(record)
            if scope["path"] not in OPEN_PATHS:
                _log(record)


class Catch:
    """Turns every exception into the service's error body: a response, or the last event of a started stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except ClientLeft:
            Exchange.of(scope).record.outcome = Outcome.LEFT
        except Exception as exc:
            if scope["type"] != "http":
                raise
            await _answer(Exchange.of(scope), exc)


class Authenticate:
    """Requires a valid key, before the body is read."""

    def __init__(self, app: ASGIApp, service: Service, now: Callable[[], datetime] | None = None) -> None:
        self._app = app
        self._service = service
        self._now = now or (lambda: datetime.now(UTC))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            exchange = Exchange.of(scope)
            _require_keys(self._service)
            authorization = exchange.header(b"authorization")
            caller = self._service.settings.keyring.authenticate(authorization, self._now())
            exchange.authenticated = caller
            exchange.record.key_name = caller.name
        await self._app(scope, receive, send)


def _require_keys(service: Service) -> None:
    """Without a configuration the service knows no keys. A 401 would make the owner of a valid key discard it."""
    try:
        service.require_configuration()
    except ConfigRefused as exc:  # the reason goes to the log: it contains names that callers must not see
        raise NotReady("Not ready: the service has no configuration.") from exc


async def _answer(exchange: Exchange, exc: Exception) -> None:
    error, record = to_http(exc), exchange.record
    is_ours = error.status >= 500
    record.status, record.error_code = error.status, error.code or error.type
    record.outcome = _outcome(exc, error)
    if error.status == 500:
        logger.error("request_id=%s failed\n%s", record.request_id, trace_of(exc))
    elif is_ours or record.outcome is Outcome.UNREAD:
        logger.warning("request_id=%s %s: %s", record.request_id, type(exc).__name__, exc)
    if exchange.response_ended:
        return  # the client has the complete answer
    if exchange.response_started:
        await send_failure(exchange, error)
    else:
        await exchange.send_error(error)
    record.status = error.status


def _outcome(exc: Exception, error: HttpError) -> Outcome:
    if isinstance(exc, ClientTooSlow):
        return Outcome.UNREAD
    return Outcome.FAILED if error.status >= 500 else Outcome.REFUSED


_LINE = (
    "request_id=%(request_id)s key=%(key)s %(method)s %(path)s status=%(status)d outcome=%(outcome)s code=%(code)s "
    "asked=%(asked)s model=%(model)s checkpoint=%(checkpoint)s adapter=%(adapter)s slug=%(slug)s endpoint=%(endpoint)s "
    "prompt_tokens=%(prompt_tokens)d cached_tokens=%(cached_tokens)d completion_tokens=%(completion_tokens)d "
    "finish_reason=%(finish_reason)s first_token_ms=%(first_token_ms)d duration_ms=%(duration_ms)d"
)


def _log(record: RequestRecord) -> None:
    """One line, whose parts are also fields of their own where the log is JSON."""
    fields = {
        "request_id": record.request_id,
        "key": record.key_name,
        "method": record.method,
        "path": _quoted(record.path),
        "status": record.status,
        "outcome": record.outcome.value,
        "code": _quoted(record.error_code),  # an upstream's, perhaps
        "asked": _quoted(record.asked_model),
        "model": record.model,
        "checkpoint": record.checkpoint,
        "adapter": record.adapter_digest[:12],
        "slug": record.slug,
        "endpoint": record.endpoint,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reason": _quoted(record.finish_reason),
        "first_token_ms": round(1000 * (record.first_token_s or 0)),
        "duration_ms": round(1000 * record.duration_s),
    }
    logger.info(_LINE, fields, extra=fields)


def _quoted(text: str) -> str:
    """A stranger's text as one word of a log line: line breaks and spaces are escaped."""
    return quote(text[:_MAX_QUOTED_CHARACTERS], safe="/:;", errors="replace")[:_MAX_QUOTED_CHARACTERS]
