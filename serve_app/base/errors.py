"""All errors of the service, and the one table that maps them to HTTP.

    ServiceError
    ├── ConfigRefused              the configuration; never reaches a caller
    ├── RequestError               the caller's fault
    │   ├── InvalidRequest             a field of the request, named by `param`
    │   ├── NotAuthenticated           no key, or not a valid one
    │   ├── NotFound                   a path
    │   ├── ModelNotFound              a base model or checkpoint that is not there, or not for this key
    │   ├── MethodNotAllowed
    │   ├── BodyTooLarge
    │   ├── UnsupportedMediaType
    │   ├── ReplyRefused               the reply broke `tool_choice` or `parallel_tool_calls`
    │   ├── UpstreamRefused            an upstream refused the request; it chose status and message
    │   └── ClientTooSlow              the reply was there, and was not read
    ├── LimitReached               the key's limits; nothing was run
    │   └── BudgetExceeded             of a day or a month
    ├── CheckpointError
    │   ├── CheckpointNotFound         not there, expired, or private to someone else
    │   ├── CheckpointIncomplete       still being written
    │   ├── CheckpointRefused          its files cannot be served; the message names the file or field
    │   └── CheckpointUnavailable      its store does not answer
    └── ServingError               ours
        ├── NoReplica                  no replica of the model is up, or it is draining
        ├── Overloaded                 the ingress has as many requests, or bytes of them, as it may
        ├── ReplicaLost                a replica died with this request
        ├── ImagesUnavailable          no process that prepares images is up, or all are too slow
        ├── ImagesOverloaded           too many images are being prepared
        ├── NoEndpoint                 no endpoint of a slug is up, or all cost more than the request allows
        ├── UpstreamFailed             an upstream failed before its first byte; another endpoint may be asked
        │   └── UpstreamOverLimit          it passed a limit of time or size
        ├── UpstreamLost               an upstream failed during its reply
        │   └── ReplyOverLimit             its reply passed such a limit
        ├── LedgerUnavailable          the database of usage does not answer; only asking for usage needs it
        ├── NotReady                   asked for readiness
        ├── FirstTokenTimeout
        └── TotalTimeout

Every error body has one shape, at every status and in a stream: `{"error": {"message", "type", "param", "code"}}`.
Errors are plain classes with positional arguments, so that they can be pickled. No message contains prompt or
completion text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engines.interface import errors as engine_errors
from renderers.base import PromptTooLong, RenderError

MAX_RETRY_AFTER_S = 30


class ServiceError(Exception):
    """Base of all errors of the service; the first argument is the message."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigRefused(ServiceError):
    """The configuration is invalid; the message names the key and the value."""


class RequestError(ServiceError):
    """The caller's fault. `param` is the request field; `code` is more specific than the status."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """The request is invalid; the message names field, limit and value."""


class NotAuthenticated(RequestError):
    """No key, or an invalid one."""


class NotFound(RequestError):
    """No such path."""


class ModelNotFound(RequestError):
    """No such model or checkpoint, or this key may not use it. The message is the same for both."""


class MethodNotAllowed(RequestError):
    """The path exists but has another method."""


class BodyTooLarge(RequestError):
    """The body is over the limit."""


class UnsupportedMediaType(RequestError):
    """The body is not plain JSON."""


class ReplyRefused(RequestError):
    """The model's reply broke a rule that the request set."""


class UpstreamRefused(RequestError):
    """An upstream refused the request for a fault of the caller, with a status that clients do not retry. Status and
    words are the upstream's, without its key.
    """

    def __init__(self, message: str, param: str | None, code: str | None, status: int, kind: str) -> None:
        super().__init__(message, param, code)
        self.args = (message, param, code, status, kind)
        self.status = status
        self.kind = kind


class ClientTooSlow(RequestError):
    """The client did not read the reply in time. Its status has been sent by then, so this error appears in the
    stream's last event, the log and the metrics.
    """


class LimitReached(ServiceError):
    """A limit of the key is reached; `retry_after_s`: when a retry can succeed."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class BudgetExceeded(LimitReached):
    """The key has spent what it may in this day or month, or its requests under way may spend it."""


class CheckpointError(ServiceError):
    """Base of the errors about one checkpoint."""


class CheckpointNotFound(CheckpointError):
    """No such checkpoint, or it has expired, or it is private to another owner."""


class CheckpointIncomplete(CheckpointError):
    """The checkpoint is still being written; retry after a second."""


class CheckpointRefused(CheckpointError):
    """The checkpoint's files cannot be served; the message names the file or field."""


class CheckpointUnavailable(CheckpointError):
    """The store does not answer; a retry may succeed."""


class ServingError(ServiceError):
    """The service's fault; a retry may succeed."""


class NoReplica(ServingError):
    """No replica of the model is running, or it is draining; callers see `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    def __str__(self) -> str:
        return f"No replica of this model is available now: {self.args[0]}; try again."


class Overloaded(ServingError):
    """The ingress is at its limit of requests or of their bytes; nothing was run."""


class ReplicaLost(ServingError):
    """The replica died or became unreachable while it ran this request."""


class ImagesUnavailable(ServingError):
    """No process that prepares images answered in time."""


class ImagesOverloaded(ServingError):
    """Too many images are being prepared; nothing was run."""


class NoEndpoint(ServingError):
    """No endpoint of the slug can be used now; the message says why."""


class UpstreamFailed(ServingError):
    """A remote endpoint failed before its first byte. The message is for the log. `retry_after_s`: what it asked for;
    0 if nothing.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s


class UpstreamOverLimit(UpstreamFailed):
    """A remote endpoint passed a limit of time or size before its first byte. The request may be the reason."""


class UpstreamLost(ServingError):
    """A remote endpoint failed during its reply. The message is for the log."""


class ReplyOverLimit(UpstreamLost):
    """The reply of a remote endpoint passed a limit of time or size. The request may be the reason."""


class LedgerUnavailable(ServingError):
    """The ledger's database does not answer; the message is for the log."""


class NotReady(ServingError):
    """A base model that must be ready cannot produce a token now."""


class FirstTokenTimeout(ServingError):
    """The first token did not come in time."""


class TotalTimeout(ServingError):
    """The request took longer than the limit for all requests."""


@dataclass(frozen=True, slots=True)
class HttpError:
    """An error as an HTTP response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, dict[str, str | None]]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table. `message` replaces the error's own message where callers must not see it."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None
    retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"
_NEVER_RETRY = MappingProxyType({"x-should-retry": "false"})

_TABLE: Mapping[type[Exception], _Row] = {
    InvalidRequest: _Row(400, _INVALID),
    RenderError: _Row(400, _INVALID),
    PromptTooLong: _Row(400, _INVALID, "context_length_exceeded"),
    engine_errors.RequestRefused: _Row(400, _INVALID),
    NotAuthenticated: _Row(401, "authentication_error", "invalid_api_key"),
    NotFound: _Row(404, _INVALID, "not_found"),
    ModelNotFound: _Row(404, _INVALID, "model_not_found"),
    CheckpointNotFound: _Row(404, _INVALID, "model_not_found"),
    CheckpointIncomplete: _Row(404, _INVALID, "checkpoint_incomplete", retry_after_s=1),
    MethodNotAllowed: _Row(405, _INVALID, "method_not_allowed"),
    BodyTooLarge: _Row(413, _INVALID, "request_too_large"),
    UnsupportedMediaType: _Row(415, _INVALID, "unsupported_media_type"),
    ReplyRefused: _Row(422, _INVALID, "tool_choice_violated"),
    UpstreamRefused: _Row(400, _INVALID),  # or another status, the upstream's
    ClientTooSlow: _Row(400, _INVALID, "client_too_slow"),
    CheckpointRefused: _Row(422, _INVALID, "checkpoint_refused"),
    engine_errors.AdapterRefused: _Row(422, _INVALID, "checkpoint_refused"),
    LimitReached: _Row(429, _RATE, "rate_limit_exceeded"),
    BudgetExceeded: _Row(429, _RATE, "budget_exceeded"),
    engine_errors.QueueFull: _Row(429, _RATE, "overloaded", "The model is overloaded; try again.", 2),
    NoReplica: _Row(503, _SERVER, "unavailable", retry_after_s=2),
    Overloaded: _Row(503, _SERVER, "overloaded", retry_after_s=1),
    ReplicaLost: _Row(503, _SERVER, "unavailable", "The replica that served this request was lost; try again.", 1),
    engine_errors.EngineStopped: _Row(503, _SERVER, "unavailable", "The replica is stopping; try again.", 1),
    engine_errors.AdapterChanged: _Row(503, _SERVER, "checkpoint_changed", "The checkpoint changed; try again.", 1),
    engine_errors.AdapterUnavailable: _Row(
        503, _SERVER, "checkpoint_unavailable", "The checkpoint could not be loaded now; try again.", 2
    ),
    CheckpointUnavailable: _Row(
        503, _SERVER, "checkpoint_unavailable", "The checkpoint store does not answer; try again.", 2
    ),
    ImagesUnavailable: _Row(503, _SERVER, "images_unavailable", "Images cannot be prepared now; try again.", 5),
    ImagesOverloaded: _Row(429, _RATE, "overloaded", retry_after_s=2),
    NoEndpoint: _Row(503, _SERVER, "no_endpoint_available", retry_after_s=5),
    UpstreamFailed: _Row(503, _SERVER, "upstream_failed", "The endpoint of this model failed; try again.", 2),
    UpstreamLost: _Row(503, _SERVER, "upstream_failed", "The endpoint of this model failed during the reply.", 2),
    LedgerUnavailable: _Row(503, _SERVER, "ledger_unavailable", "The usage cannot be read now; try again.", 5),
    NotReady: _Row(503, _SERVER, "not_ready", retry_after_s=2),
    FirstTokenTimeout: _Row(503, _SERVER, "timeout", retry_after_s=5),
    TotalTimeout: _Row(503, _SERVER, "timeout"),
    engine_errors.NonFiniteLogits: _Row(500, _SERVER, "non_finite_logits", "The model computed NaN or infinity."),
}
_OURS = _Row(500, _SERVER, "internal_error", "The service failed on this request.")


def to_http(exc: BaseException) -> HttpError:
    """Map an exception to a response. An exception that is not in the table becomes 500 without detail."""
    row = next((_TABLE[kind] for kind in type(exc).__mro__ if kind in _TABLE), _OURS)
    headers = _retry_headers(exc, row)
    message = row.message or str(exc)
    if isinstance(exc, UpstreamRefused):
        return HttpError(exc.status, message, exc.kind, exc.param, exc.code, headers)
    return HttpError(row.status, message, row.type, _param(exc), _code(exc) or row.code, headers)


def codes_by_status() -> dict[int, list[str]]:
    """Every status that an error can have, with its codes in the table. Some errors have more specific codes."""
    codes: dict[int, set[str]] = {}
    for row in (*_TABLE.values(), _OURS):
        codes.setdefault(row.status, set()).update([row.code] if row.code else [])
    return {status: sorted(found) for status, found in sorted(codes.items())}


def _retry_headers(exc: BaseException, row: _Row) -> Mapping[str, str]:
    if row.status == 500 or isinstance(exc, TotalTimeout):
        return _NEVER_RETRY
    if isinstance(exc, LimitReached):
        return {"retry-after": str(min(MAX_RETRY_AFTER_S, max(1, -int(-exc.retry_after_s // 1))))}
    return {} if row.retry_after_s is None else {"retry-after": str(row.retry_after_s)}


def _param(exc: BaseException) -> str | None:
    if isinstance(exc, RequestError | RenderError):
        return exc.param
    if isinstance(exc, engine_errors.RequestRefused):
        return exc.field
    is_checkpoint = isinstance(exc, CheckpointError | engine_errors.AdapterError)
    return "model" if is_checkpoint else None


def _code(exc: BaseException) -> str | None:
    return exc.code if isinstance(exc, RequestError) else None
