"""What is written to log files."""

import io
import logging

import pytest
from ray.exceptions import RayTaskError

from serve_app.base.logs import Plain, PlainStream, join_serve_logs

COLOURED = "\x1b[36mray::ServeReplica:m:engine.run()\x1b[39m (pid=7)"


def test_lines_and_tracebacks_in_files_have_no_colours() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.addFilter(Plain())
    logger = logging.getLogger("tests.plain")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    logger.warning("a replica failed: %s", COLOURED)
    try:
        raise RayTaskError("run", f"Traceback (most recent call last):\n  {COLOURED}\nOSError: x", OSError("x"))
    except RayTaskError:
        logger.exception("it failed")
    logger.info("100 %% of %d", 5)
    assert "\x1b" not in written.getvalue()
    assert "a replica failed: ray::ServeReplica:m:engine.run() (pid=7)\n" in written.getvalue()
    assert "OSError: x" in written.getvalue()
    assert "100 % of 5\n" in written.getvalue()


@pytest.fixture
def serve_handler():
    """A handler of Serve's logger, which is put back as it was."""
    names = ("ray.serve", "serve_app", "engines", "renderers")
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in names}
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger("ray.serve").handlers = [handler]
    yield handler
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers, logging.getLogger(name).propagate = handlers, propagate


def test_the_logs_of_serve_are_joined_plain_and_as_often_as_one_likes(serve_handler: logging.StreamHandler) -> None:
    for _ in range(3):
        join_serve_logs()
    logging.getLogger("serve_app.replicas").error("it failed: %s", COLOURED)
    assert serve_handler.stream.getvalue() == "it failed: ray::ServeReplica:m:engine.run() (pid=7)\n"
    assert len(serve_handler.filters) == 1


def test_what_is_printed_to_a_file_has_no_colours() -> None:
    raw = io.BytesIO()
    stream = PlainStream(raw, encoding="utf-8", line_buffering=True)
    print(f"{COLOURED} ü", file=stream)
    assert raw.getvalue().decode() == "ray::ServeReplica:m:engine.run() (pid=7) ü\n"
    assert not stream.isatty()
