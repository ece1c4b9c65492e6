"""OpenTelemetry spans of requests: one for each, with a child for each stage of its way.

They are made when a request has ended, from the times in its record. So requests carry no span, and nothing of this is
loaded where tracing is off. No span has text of a conversation.
"""

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import StatusCode

from serve_app.api.record import Outcome, RequestRecord

_SERVICE: Final = "roundhouse"
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class Spans:
    """Sends the spans of requests to an exporter, from a thread of its own. `close` it."""

    def __init__(self, exporter: SpanExporter, *, sample: float) -> None:
        """`sample`: the share of the requests without a `traceparent` that are traced."""
        sampler = ParentBased(TraceIdRatioBased(sample))
        self._provider = TracerProvider(
            sampler=sampler, resource=Resource.create({"service.name": _SERVICE}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(_SERVICE)

    def add(self, record: RequestRecord) -> None:
        """The spans of a request that has ended."""
        to_unix_ns = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return round(seconds * 1e9) + to_unix_ns

        span = self._tracer.start_span(
            _name(record),
            _parent(record),
            SpanKind.SERVER,
            start_time=at(record.started_at),
        )
        if span.is_recording():
            span.set_attributes(_attributes(record))
            if record.outcome is Outcome.FAILED:
                span.set_status(StatusCode.ERROR, record.error_code)
            inside = set_span_in_context(span, Context())
            for stage in record.stages.done:
                child = self._tracer.start_span(stage.name, inside, start_time=at(stage.began_at))
                child.end(at(stage.ended_at))
        span.end(at(record.started_at + record.duration_s))

    def close(self) -> None:
        """Blocks until what is left was sent, or the exporter gave up."""
        self._provider.shutdown()


def _name(record: RequestRecord) -> str:
    """Few names: callers can send any path."""
    return f"{record.method} {record.route}"


def _parent(record: RequestRecord) -> Context:
    """The caller's own span. Without a valid key nobody decides that a request is traced."""
    if not record.key_name or not record.traceparent:
        return Context()
    return _PROPAGATOR.extract({"traceparent": record.traceparent}, Context())


def _attributes(record: RequestRecord) -> Mapping[str, str | int | bool]:
    """By OpenTelemetry's conventions where there are any."""
    return {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "roundhouse.request_id": record.request_id,
        "roundhouse.key": record.key_name,
        "roundhouse.outcome": record.outcome.value,
        "roundhouse.error_code": record.error_code,
        "roundhouse.finish_reason": record.finish_reason,
        "roundhouse.adapter": record.adapter_digest,
        "roundhouse.cached_tokens": record.cached_tokens,
        "roundhouse.slug": record.slug,
        "roundhouse.endpoint": record.endpoint,
        "roundhouse.streamed": record.streamed,
    }
