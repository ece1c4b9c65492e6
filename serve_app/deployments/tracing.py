"""Tracing by option: what is recorded of requests also becomes spans (`spans.py`), which only this file loads."""

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Final

from serve_app.api.record import Recorder, RequestRecord
from serve_app.api.stages import TimedStages
from serve_app.base.errors import ConfigRefused
from serve_app.config.api import TracingConfig
from serve_app.config.checking.refusal import Refusal
from serve_app.replicas.token_gaps import TokenGaps

if TYPE_CHECKING:
    from serve_app.deployments.spans import Spans

_SPANS: Final = "serve_app.deployments.spans"
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def require_packages() -> None:
    """Raises `ConfigRefused` when the packages of the extra are missing."""
    for module in (_SPANS, _EXPORTER):
        _loaded(module)


def open_spans(config: TracingConfig) -> "Spans":
    """Raises `ConfigRefused` as `require_packages` does."""
    exporter = _loaded(_EXPORTER).OTLPSpanExporter(endpoint=config.endpoint)
    opened: Spans = _loaded(_SPANS).Spans(exporter, sample=config.sample)
    return opened


def _loaded(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise ConfigRefused(f"tracing needs {exc.name}, which is not installed: pip install '.[tracing]'.") from exc


class Traced:
    """A recorder that also makes spans of requests, but not of probes."""

    def __init__(self, recorder: Recorder, spans: "Spans") -> None:
        self._recorder = recorder
        self._spans = spans

    def request_started(self, record: RequestRecord) -> None:
        if not record.is_probe:
            record.stages = TimedStages()
        self._recorder.request_started(record)

    def request_ended(self, record: RequestRecord) -> None:
        self._recorder.request_ended(record)
        if not record.is_probe:
            self._spans.add(record)

    def gaps_of(self, model: str) -> TokenGaps:
        return self._recorder.gaps_of(model)

    def config_checked(self, refusals: Sequence[Refusal]) -> None:
        self._recorder.config_checked(refusals)
