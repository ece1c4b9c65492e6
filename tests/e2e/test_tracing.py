"""The spans of a real service, at a receiver of OpenTelemetry traces."""

import base64
import copy
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Service
from tests.e2e.service_config import MODEL
from tests.support.processes.otlp_receiver import Receiver, running_receiver
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def traced(session_service: Service, receiver: Receiver) -> Iterator[Service]:
    config = copy.deepcopy(session_service.config)
    config["applications"][0]["args"]["tracing"] = {"endpoint": receiver.endpoint, "sample": 0.0}
    with session_service.serving(MODEL, config) as service:
        yield service


def test_a_request_of_a_caller_that_traces_is_in_its_trace(traced: Service, receiver: Receiver) -> None:
    def asked() -> bool:
        """Again until the ingress that traces has replaced the one before."""
        header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        traced.sdk().completions.create(model=MODEL, prompt="x", max_tokens=3, extra_headers=header)
        return bool(receiver.spans())

    eventually(asked, 60)
    spans = receiver.spans()
    assert {base64.b64decode(span["traceId"]).hex() for span in spans} == {TRACE}
    request = next(span for span in spans if span["name"] == "POST completions")
    assert base64.b64decode(request["parentSpanId"]).hex() == PARENT
    stages = [span for span in spans if span.get("parentSpanId") == request["spanId"]]
    names = ["receive", "parse", "resolve", "validate", "render", "route", "queue", "prefill", "decode"]
    assert [span["name"] for span in stages] == names
