"""Where this package's log lines go inside Serve: to the files and in the format of Serve's own."""

import logging

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
