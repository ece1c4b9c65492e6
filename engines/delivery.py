"""Outputs on their way from an engine to those who asked."""

import logging
from collections.abc import Iterable

from engines.protocol import Output, OutputSink

logger = logging.getLogger(__name__)


def deliver(outputs: Iterable[tuple[OutputSink, Output]]) -> list[str]:
    """One call per sink. Returns the requests of those sinks that failed, which are to be aborted; whatever is wrong
    with one sink, the others get their tokens.
    """
    by_sink: dict[int, tuple[OutputSink, list[Output]]] = {}
    for sink, output in outputs:
        by_sink.setdefault(id(sink), (sink, []))[1].append(output)
    failed: list[str] = []
    for sink, batch in by_sink.values():
        try:
            sink.deliver(batch)
        except Exception:
            logger.exception("a sink failed; its requests are aborted")
            failed += [output.request_id for output in batch]
    return failed
