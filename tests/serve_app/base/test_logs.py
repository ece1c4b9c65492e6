"""What is written to log files."""

import asyncio
import contextvars
import io
import logging

import pytest
from ray.exceptions import RayTaskError

from serve_app.base.logs import Plain, PlainStream, engine_request_id, join_serve_logs, log_request
from serve_app.base.workers import Workers

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
    assert len(serve_handler.filters) == 2


def test_the_handlers_that_serve_sets_up_later_are_joined_too(serve_handler: logging.StreamHandler) -> None:
    join_serve_logs()
    later = logging.StreamHandler(io.StringIO())
    logging.getLogger("ray.serve").handlers = [later]
    join_serve_logs()
    logging.getLogger("engines.loop").error(COLOURED)
    assert (serve_handler.stream.getvalue(), later.stream.getvalue().count("\x1b")) == ("", 0)
    assert later.stream.getvalue().endswith("(pid=7)\n")


@pytest.fixture
def with_ids(serve_handler: logging.StreamHandler) -> logging.StreamHandler:
    """A handler that shows the id of each line."""
    serve_handler.setFormatter(logging.Formatter("%(request_id)s: %(message)s", defaults={"request_id": "none"}))
    join_serve_logs()
    return serve_handler


def test_the_lines_of_a_request_have_its_id_in_its_tasks_and_threads(with_ids: logging.StreamHandler) -> None:
    logger = logging.getLogger("serve_app.here")

    async def answer(name: str, workers: Workers) -> None:
        log_request(name)
        await asyncio.gather(asyncio.create_task(inner()), workers.run(10**4, logger.error, "thread"))
        logger.error("end")

    async def inner() -> None:
        await asyncio.sleep(0)
        logger.error("task")

    async def both() -> None:
        workers = Workers()
        await asyncio.gather(answer("a", workers), answer("b", workers))
        logger.error("neither")
        workers.close()

    asyncio.run(both())
    every = [f"{name}: {what}" for name in "ab" for what in ("end", "task", "thread")]
    assert sorted(with_ids.stream.getvalue().splitlines()) == [*every, "none: neither"]


def test_a_line_of_the_engine_has_the_ids_of_its_requests(with_ids: logging.StreamHandler) -> None:
    ids = [engine_request_id("mine", "chatcmpl-1"), engine_request_id("yours", "cmpl-2") + "/7"]
    logging.getLogger("engines.loop").error("it failed", extra={"request_ids": ids})
    assert with_ids.stream.getvalue() == "mine,yours: it failed\n"


def test_the_id_of_this_service_wins_over_that_of_serve(with_ids: logging.StreamHandler) -> None:
    def line() -> None:
        log_request("ours")
        logging.getLogger("serve_app.here").error("x", extra={"request_id": "of-serve"})

    contextvars.copy_context().run(line)
    logging.getLogger("serve_app.here").error("y", extra={"request_id": "of-serve"})
    assert with_ids.stream.getvalue() == "ours: x\nof-serve: y\n"


def test_what_is_printed_to_a_file_has_no_colours() -> None:
    raw = io.BytesIO()
    stream = PlainStream(raw, encoding="utf-8", line_buffering=True)
    print(f"{COLOURED} ü", file=stream)
    assert raw.getvalue().decode() == "ray::ServeReplica:m:engine.run() (pid=7) ü\n"
    assert not stream.isatty()
