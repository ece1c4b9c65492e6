"""The log: inside Serve its lines go to the files and in the format of Serve's own; no text of a conversation in it."""

import logging
import traceback

from engines.errors import EngineError
from serve_app.errors import ServiceError

_SERVE_LOGGER = "ray.serve"
_OURS = ("serve_app", "engines", "renderers")


def join_serve_logs() -> None:
    """Called by each deployment as it starts, after Serve has set its logger up for the process."""
    serve = logging.getLogger(_SERVE_LOGGER)
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = list(serve.handlers)
        logger.setLevel(serve.level)
        logger.propagate = False


def trace_of(exc: BaseException) -> str:
    """Where an exception came from. What it says only if it is one of ours: others quote the value at fault, which may
    be the text of a conversation.
    """
    lines: list[str] = []
    one: BaseException | None = exc
    while one is not None:
        said = f": {one}" if isinstance(one, ServiceError | EngineError) else ""
        lines = [*traceback.format_tb(one.__traceback__), f"{type(one).__qualname__}{said}\n", *lines]
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "".join(lines)
