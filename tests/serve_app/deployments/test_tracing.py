"""The spans of requests: which there are, whose children they are, and what they say."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.status import StatusCode

from engines.fake import FakeConfig
from engines.interface.errors import NonFiniteLogits
from serve_app.api.record import RequestRecord
from serve_app.base.errors import ConfigRefused
from serve_app.config.api import TracingConfig
from serve_app.deployments import tracing
from serve_app.deployments.spans import Spans
from serve_app.deployments.tracing import Traced, open_spans, require_packages
from tests.support.harness import CHAT, CONTEXT, KEY, ListRecorder, RunningEdge, config_for, running_edge
from tests.support.processes.otlp_receiver import running_receiver

pytest_plugins = ("tests.support.edge_fixtures",)

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SAMPLED, NOT_SAMPLED = (f"00-{TRACE:032x}-{PARENT:016x}-{flag}" for flag in ("01", "00"))
CANARY = "nobody may read this"
STAGES = ["receive", "parse", "resolve", "validate", "render", "route", "queue", "prefill", "decode"]


@dataclass
class Tracing(ListRecorder):
    """Keeps the records, and makes spans of them as an ingress does."""

    sample: float = 1.0
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.spans = Spans(self.exporter, sample=self.sample)
        self._traced = Traced(ListRecorder(), self.spans)

    def request_started(self, record: RequestRecord) -> None:
        self._traced.request_started(record)
        super().request_started(record)

    def request_ended(self, record: RequestRecord) -> None:
        self._traced.request_ended(record)
        super().request_ended(record)

    def ended_spans(self) -> Sequence[ReadableSpan]:
        self.spans.close()
        found: Sequence[ReadableSpan] = self.exporter.get_finished_spans()
        return found


@contextmanager
def tracing_edge(model_folders: dict[str, str], recorder: Tracing) -> Iterator[RunningEdge]:
    engine = FakeConfig(vocab_size=512, context_length=CONTEXT)
    with running_edge(config_for(model_folders), engine, recorder=recorder) as edge:
        yield edge
        edge.wait_until_idle()


def chat(edge: RunningEdge, key: str = KEY, **headers: str) -> None:
    body = {"model": CHAT, "messages": [{"role": "user", "content": CANARY}], "max_tokens": 5}
    with edge.http(key) as client:
        client.post("/chat/completions", json=body, headers=headers)


def spans_of(model_folders: dict[str, str], *headers: dict[str, str], sample: float = 1.0) -> Sequence[ReadableSpan]:
    recorder = Tracing(sample=sample)
    with tracing_edge(model_folders, recorder) as edge:
        for some in headers:
            chat(edge, **some)
    return recorder.ended_spans()


def test_a_request_is_a_span_of_the_callers_trace_with_a_child_for_each_stage(model_folders: dict[str, str]) -> None:
    *children, request = spans_of(model_folders, {"traceparent": SAMPLED, "x-request-id": "mine"})
    assert (request.name, request.kind, request.context.trace_id) == ("POST chat", SpanKind.SERVER, TRACE)
    assert request.parent is not None
    assert request.parent.span_id == PARENT
    assert [child.name for child in children] == STAGES
    assert {child.parent.span_id for child in children if child.parent} == {request.context.span_id}
    times = [(span.start_time or 0, span.end_time or 0) for span in (request, *children)]
    (began, ended), *inner = times
    assert all(began <= start <= end <= ended for start, end in inner)
    assert sorted(inner) == inner
    assert request.attributes is not None
    told = {name: request.attributes[name] for name in ("roundhouse.request_id", "gen_ai.request.model")}
    assert told == {"roundhouse.request_id": "mine", "gen_ai.request.model": CHAT}
    assert (request.attributes["http.response.status_code"], request.attributes["gen_ai.usage.output_tokens"]) == (
        200,
        5,
    )
    assert CANARY not in "".join(span.to_json() for span in (request, *children))


@pytest.mark.parametrize(
    ("headers", "sample", "num_requests"),
    [
        ({}, 1, 1),
        ({}, 0, 0),
        ({"traceparent": SAMPLED}, 0, 1),
        ({"traceparent": NOT_SAMPLED}, 1, 0),
        ({"traceparent": "00-x"}, 1, 1),
    ],
)
def test_the_caller_decides_whether_a_request_is_traced_and_else_the_configuration(
    model_folders: dict[str, str], headers: dict[str, str], sample: float, num_requests: int
) -> None:
    spans = spans_of(model_folders, headers, sample=sample)
    assert [span.name for span in spans].count("POST chat") == num_requests
    assert (len(spans) > 0) == (num_requests > 0)


def test_without_a_valid_key_nobody_puts_a_span_into_a_trace(model_folders: dict[str, str]) -> None:
    recorder = Tracing()
    with tracing_edge(model_folders, recorder) as edge:
        chat(edge, "rh-wrong-key", traceparent=SAMPLED)
    (request,) = recorder.ended_spans()
    assert request.parent is None
    assert request.context.trace_id != TRACE
    assert request.status.status_code is StatusCode.UNSET


def test_a_failure_of_the_service_is_the_status_of_its_span(model_folders: dict[str, str]) -> None:
    recorder = Tracing()
    with tracing_edge(model_folders, recorder) as edge:
        edge.script.reply = lambda request: [NonFiniteLogits("x")]
        chat(edge)
    *children, request = recorder.ended_spans()
    assert request.status.status_code is StatusCode.ERROR
    assert children[-1].name == "route"


def test_probes_have_no_spans(model_folders: dict[str, str]) -> None:
    recorder = Tracing()
    with tracing_edge(model_folders, recorder) as edge, edge.http(None) as client:
        assert client.get("../readyz").status_code == 200
    assert recorder.ended_spans() == ()


def test_a_missing_package_is_named_with_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, tracing._EXPORTER, None)
    with pytest.raises(ConfigRefused) as refused:
        require_packages()
    assert str(refused.value) == (
        f"tracing needs {tracing._EXPORTER}, which is not installed: pip install '.[tracing]'."
    )


def test_an_ingress_without_tracing_loads_nothing_of_it() -> None:
    code = "import sys, serve_app.deployments.ingress; print(tracing._SPANS in sys.modules)"
    code = f"from serve_app.deployments import tracing; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "False\n"


def test_a_receiver_of_otlp_gets_the_spans() -> None:
    with running_receiver() as receiver:
        spans = open_spans(TracingConfig(endpoint=receiver.endpoint))
        spans.add(RequestRecord("mine", "POST", "/v1/completions", started_at=1.0, duration_s=0.25))
        spans.close()
    (export,) = receiver.exports
    (told,) = export["resourceSpans"]
    assert {"key": "service.name", "value": {"stringValue": "roundhouse"}} in told["resource"]["attributes"]
    (span,) = receiver.spans()
    assert span["name"] == "POST completions"
    assert int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"]) == 250_000_000
