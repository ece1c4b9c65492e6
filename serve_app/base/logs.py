"""Logging: inside Serve, lines go to Serve's files in Serve's format. The log never contains conversation text."""

import io
import logging
import re
import traceback

from engines.interface.errors import EngineError
from serve_app.base.errors import ServiceError

_SERVE_LOGGER = "ray.serve"
_OURS = ("serve_app", "engines", "renderers")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def join_serve_logs() -> None:
    """Each deployment calls this at start, after Serve has set up its logger for the process."""
    serve = logging.getLogger(_SERVE_LOGGER)
    for handler in serve.handlers:
        if not any(isinstance(known, Plain) for known in handler.filters):
            handler.addFilter(Plain())
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.level)
        logger.propagate = False


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
