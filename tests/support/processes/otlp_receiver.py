"""A receiver of OpenTelemetry traces: OTLP over HTTP, on loopback."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from serve_app.deployments import tracing

Json = dict[str, Any]


@dataclass
class Receiver:
    """`exports`: what came, as OTLP's own JSON."""

    endpoint: str = ""
    exports: list[Json] = field(default_factory=list)

    def spans(self) -> list[Json]:
        return [
            span
            for export in self.exports
            for of_resource in export["resourceSpans"]
            for of_scope in of_resource["scopeSpans"]
            for span in of_scope["spans"]
        ]


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    """Skips the test where what sends to it is not installed."""
    pytest.importorskip(tracing._EXPORTER, reason="pip install '.[tracing]'")
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.exports.append(json.loads(MessageToJson(ExportTraceServiceRequest.FromString(body))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
