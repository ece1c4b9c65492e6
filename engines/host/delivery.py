"""Delivers an engine's outputs to the sinks of their requests."""

import logging
from collections.abc import Iterable

from engines.interface.protocol import Output, OutputSink

logger = logging.getLogger(__name__)


def deliver(outputs: Iterable[tuple[OutputSink, Output]]) -> list[str]:
    """One call per sink. Returns the requests of the sinks that failed, for the caller to abort. A sink that fails does
    not affect the others.
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
