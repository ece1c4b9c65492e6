"""Logging: inside Serve, lines go to Serve's files in Serve's format. The log never contains conversation text.

Every line of a request has its id, in all processes that the request passes through. With `encoding: JSON` in Serve's
`logging_config` each line is an object, whose field `request_id` it is.
"""

import io
import logging
import re
import traceback
from contextvars import ContextVar

from engines.interface.errors import EngineError
from serve_app.base.errors import ServiceError

_SERVE_LOGGER = "ray.serve"
_OURS = ("serve_app", "engines", "renderers")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_SEPARATOR = "/"  # the ids of requests have none
_current: ContextVar[str] = ContextVar("request_id", default="")


def join_serve_logs() -> None:
    """Each deployment calls this at start, after Serve has set up its logger for the process, and at each health check:
    Serve sets its logger up anew when `logging_config` changes.
    """
    serve = logging.getLogger(_SERVE_LOGGER)
    for handler in serve.handlers:
        if not any(isinstance(known, Plain) for known in handler.filters):
            handler.addFilter(Plain())
            handler.addFilter(RequestIds())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.level)
        logger.propagate = False


def log_request(request_id: str) -> None:
    """From now on the lines of this task, and of the tasks that it starts, have this id."""
    _current.set(request_id)


def engine_request_id(request_id: str, unique: str) -> str:
    """An id for the engine, which begins with the request's: callers choose that one, so it may repeat."""
    return f"{request_id}{_SEPARATOR}{unique}"


def request_id_of(engine_request_id: str) -> str:
    """The id of the request that an engine knows by another."""
    return engine_request_id.partition(_SEPARATOR)[0]


def plain(text: str) -> str:
    """The text without the ANSI colours that Ray writes into messages and tracebacks."""
    return _ANSI.sub("", text) if "\x1b" in text else text


class Plain(logging.Filter):
    """Removes ANSI colours from the lines of a handler that writes to files."""

    _traces = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "\x1b" in message:
            record.msg, record.args = plain(message), ()
        if record.exc_info:
            record.exc_text = plain(record.exc_text or self._traces.formatException(record.exc_info))
        return True


class RequestIds(logging.Filter):
    """Sets `request_id` of a handler's lines, which Serve's formats show. The engine's thread works for many requests,
    so its lines name theirs as `request_ids`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        ids = record.__dict__.get("request_ids", ())
        request_id = _current.get() or ",".join(map(request_id_of, ids))
        if request_id:
            record.request_id = request_id
        return True


class PlainStream(io.TextIOWrapper):
    """Standard output or error of a process, without colours, because it goes to a file."""

    def write(self, text: str, /) -> int:
        super().write(plain(text))
        return len(text)


def trace_of(exc: BaseException) -> str:
    """The traceback of an exception. The message is included only for our own exceptions: others may quote conversation
    text.
    """
    lines: list[str] = []
    one: BaseException | None = exc
    while one is not None:
        said = f": {one}" if isinstance(one, ServiceError | EngineError) else ""
        lines = [*traceback.format_tb(one.__traceback__), f"{type(one).__qualname__}{said}\n", *lines]
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "".join(lines)
