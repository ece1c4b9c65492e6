"""What is kept of a request: numbers, and nothing of its text."""

import logging
from typing import Any

import pytest
from harness import BASE, CHAT, KEY, RunningEdge, StoredCheckpoint

from engines.errors import AdapterChanged, EngineStopped
from engines.protocol import GenerateRequest
from serve_app.usage import Outcome, RequestRecord

pytest_plugins = ("edge_fixtures",)


def last_record(edge: RunningEdge) -> RequestRecord:
    edge.wait_until_idle()
    return edge.recorder.ended[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_recorded_with_its_numbers(edge: RunningEdge, stream: bool) -> None:
    edge.script.says("abc")
    with edge.http() as client:
        body = {"model": BASE, "prompt": "hi", "stream": stream}
        client.post("/completions", json=body, headers={"x-request-id": "mine"})
    found = last_record(edge)
    assert (found.request_id, found.method, found.path, found.key_name) == ("mine", "POST", "/v1/completions", "test")
    assert (found.model, found.adapter_digest, found.streamed) == (BASE, "", stream)
    assert (found.status, found.error_code, found.outcome) == (200, "", Outcome.DONE)
    assert (found.prompt_tokens, found.completion_tokens, found.finish_reason) == (2, 4, "stop")
    assert found.first_token_s is not None
    assert 0 < found.first_token_s <= found.duration_s < 30


def test_the_adapter_is_recorded_by_its_content(edge: RunningEdge) -> None:
    path = "tinker://r/sampler_weights/n"
    edge.checkpoints.held[path] = StoredCheckpoint("digest-1")
    edge.complete(model=path, max_tokens=1)
    found = last_record(edge)
    assert (found.model, found.adapter_digest) == (CHAT, "digest-1")


@pytest.mark.parametrize(
    ("fields", "status", "code", "outcome"),
    [
        ({"temperature": -1}, 400, "invalid_request_error", Outcome.REFUSED),
        ({"model": "made up by the caller"}, 404, "model_not_found", Outcome.REFUSED),
    ],
)
def test_a_refusal_is_recorded_without_what_the_caller_made_up(
    edge: RunningEdge, fields: Any, status: int, code: str, outcome: Outcome
) -> None:
    edge.complete(**fields)
    found = last_record(edge)
    assert (found.status, found.error_code, found.outcome, found.model) == (status, code, outcome, "")


def test_a_failure_in_a_stream_is_recorded_with_the_status_it_would_have_had(edge: RunningEdge) -> None:
    edge.script.reply = lambda request: [*edge.script.encode("ab"), EngineStopped("x")]
    assert edge.complete(stream=True).status_code == 200
    found = last_record(edge)
    assert (found.status, found.error_code, found.outcome) == (503, "unavailable", Outcome.FAILED)
    assert found.completion_tokens == 2


def test_every_start_has_an_end(edge: RunningEdge) -> None:
    edge.wait_until_idle()
    before = edge.recorder.started
    for fields in ({}, {"stream": True}, {"temperature": -1}):
        edge.complete(max_tokens=2, **fields)
    edge.wait_until_idle()
    assert edge.recorder.started == before + 3
    assert len(edge.recorder.ended) == 3


def test_logs_hold_neither_text_nor_keys(edge: RunningEdge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    edge.script.says("SECRET REPLY")
    edge.chat("SECRET PROMPT")
    edge.complete("SECRET PROMPT", stream=True)
    edge.complete(["SECRET PROMPT", 5])
    edge.script.reply = lambda request: [ValueError("SECRET REPLY")]  # type: ignore[list-item]  # a broken engine
    edge.chat("SECRET PROMPT", max_tokens=3)
    edge.wait_until_idle()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("serve_app")]
    assert sum("request_id=" in line and "status=" in line for line in lines) == 4
    assert "SECRET" not in "\n".join(line for line in lines)
    assert KEY not in caplog.text


def test_a_checkpoint_that_is_replaced_just_now_is_served_with_its_new_content(edge: RunningEdge) -> None:
    path = "tinker://r/sampler_weights/n"
    edge.checkpoints.held[path] = StoredCheckpoint("old")

    def reply(request: GenerateRequest) -> list[Any]:
        assert request.adapter is not None
        edge.checkpoints.held[path] = StoredCheckpoint("new")
        return [AdapterChanged("old")] if request.adapter.digest == "old" else edge.script.encode("new content")

    edge.script.reply = reply
    assert edge.complete(model=path).json()["choices"][0]["text"] == "new content"
    assert last_record(edge).adapter_digest == "new"


def test_a_replica_that_begins_to_drain_hands_the_request_to_another(edge: RunningEdge) -> None:
    replies: Any = iter([[EngineStopped("draining")], edge.script.encode("from another")])
    edge.script.reply = lambda request: next(replies)
    assert edge.complete().json()["choices"][0]["text"] == "from another"
    ids = [request.request_id for request in edge.script.requests]
    assert len(set(ids)) == 2


def test_a_checkpoint_that_keeps_changing_is_503(edge: RunningEdge) -> None:
    edge.checkpoints.held["tinker://r/sampler_weights/n"] = StoredCheckpoint("d")
    edge.script.reply = lambda request: [AdapterChanged("d")]
    response = edge.complete(model="tinker://r/sampler_weights/n")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "checkpoint_changed")
    assert len(edge.script.requests) == 2
