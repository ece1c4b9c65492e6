"""What is kept of a request: numbers, and nothing of its text."""

import json
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from typing import Any, Self

import httpx
import pytest

from engines.interface.errors import AdapterChanged, EngineStopped, NonFiniteLogits
from engines.interface.protocol import GenerateRequest, TokenDelta
from serve_app.api.record import Outcome, RequestRecord
from serve_app.base.errors import ReplicaLost
from tests.support.harness import BASE, CHAT, KEY, RunningEdge, StoredCheckpoint

pytest_plugins = ("tests.support.edge_fixtures",)


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


CANARY = "canary-5b1f-in-a-coal-mine"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def everything_with(edge: RunningEdge, text: str) -> list[httpx.Response]:
    """Requests of every outcome with this text wherever a conversation has text, and as a key."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": text})}}
    broken = {**call, "function": {"name": "f", "arguments": text}}
    messages = [{"role": "user", "content": text}]
    history: list[Any] = [{"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": text}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}
    chats: list[Any] = [
        [*messages, *history, result],
        [*messages, {"role": "assistant", "tool_calls": [broken]}],
        [{"role": "user", "content": [image]}],
        [{"role": "user", "content": [text]}],
        [{"role": "user", "content": {"text": text}}],
        [{"role": "assistant", "tool_calls": text}],
        [{"role": "assistant", "tool_calls": [{**call, "function": text}]}],
        [text],
        [{"role": "user", "content": "x", "reasoning_content": text}],
        [{"role": "user", "content": text * 500}],
        text,
    ]
    responses = [edge.post("/chat/completions", model=CHAT, messages=chat, max_tokens=9) for chat in chats]
    prompts: list[Any] = [text, [text, text], [1, text], {"a": text}, text * 500]
    responses += [edge.complete(prompt, max_tokens=9) for prompt in prompts]
    responses += [edge.complete(text, max_tokens=5000), edge.complete(text, stream=True, max_tokens=9)]
    responses += [
        edge.chat(text, logprobs=5),
        edge.chat(text, tools=TOOLS, tool_choice="required"),
        edge.complete(text, key=text),
    ]
    with edge.http() as client:
        headers = {"content-type": "application/json"}
        responses.append(client.post("/completions", content=f'{{"prompt": "{text}'.encode(), headers=headers))
        responses.append(client.post("/completions", content=text, headers={"content-type": "text/plain"}))
    return responses


def broken_by(request: GenerateRequest) -> list[Any]:
    raise ValueError(f"{CANARY} cannot be read")


def test_neither_text_nor_keys_are_in_logs_records_or_errors(
    edge: RunningEdge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    edge.script.says(f"<think>\n{CANARY}\n</think>\n\n<tool_call>\n{CANARY}\n</tool_call>")
    responses = everything_with(edge, CANARY)
    edge.script.reply = broken_by
    responses += [edge.chat(CANARY), edge.complete(CANARY, stream=True)]
    edge.script.reply = lambda request: [*edge.script.encode("ab"), NonFiniteLogits("layer 3")]
    responses += [edge.chat(CANARY), edge.complete(CANARY, stream=True)]
    edge.wait_until_idle()
    statuses = [response.status_code for response in responses]
    assert {200, 400, 401, 415, 422, 500} <= set(statuses), statuses
    failures = [response.text for response in responses if response.status_code != 200]
    failures += [response.text for response in responses[-1:]]  # an error event, after tokens that tell nothing
    own = [record for record in caplog.records if record.name.startswith(("serve_app", "renderers", "engines"))]
    assert sum("request_id=" in record.getMessage() for record in own) >= len(responses)
    lines = "\n".join(map(logging.Formatter().format, own))
    assert all(sign in lines for sign in ("ValueError\n", "in broken_by", "layer 3"))  # what an operator needs
    for secret in (CANARY, KEY):
        assert secret not in lines + "".join(failures) + repr(edge.recorder.ended)


def test_a_path_cannot_forge_a_line_of_the_log(edge: RunningEdge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_app")
    with edge.http() as client:
        client.get("/models/x%0Arequest_id=forged%0D%1B[2J" + "y" * 3000)
    edge.wait_until_idle()
    (line,) = [record.getMessage() for record in caplog.records if "GET" in record.getMessage()]
    assert " /v1/models/x%0Arequest_id%3Dforged%0D%1B%5B2Jyyy" in line
    assert "\n" not in line
    assert len(line) < 1500


def lines_of(edge: RunningEdge, caplog: pytest.LogCaptureFixture) -> list[str]:
    edge.wait_until_idle()
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request_id=")]
    caplog.clear()
    return lines


def test_the_log_has_one_line_per_request_with_the_checkpoint_and_the_model_asked_for(
    edge: RunningEdge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "serve_app")
    path = "tinker://run:train:0/sampler_weights/000080"
    edge.checkpoints.held[path] = StoredCheckpoint("a" * 64)
    edge.complete(model=f"{CHAT}:peft:128;{path}", max_tokens=1)
    (line,) = lines_of(edge, caplog)
    assert f" asked={CHAT}:peft:128;{path} model={CHAT} checkpoint={path} adapter=aaaaaaaaaaaa " in line
    edge.complete(max_tokens=1)
    (line,) = lines_of(edge, caplog)
    assert f" asked={BASE} model={BASE} checkpoint= adapter= " in line


@pytest.mark.parametrize(
    ("fields", "status", "asked"),
    [
        ({"temperature": -1}, 400, BASE),
        ({"model": "made/Up"}, 404, "made/Up"),
        ({"model": "tinker://r/sampler_weights/none"}, 404, "tinker://r/sampler_weights/none"),
        ({"model": "two words\nstatus=200"}, 404, "two%20words%0Astatus%3D200"),
        ({"model": "x" * 5000}, 400, "x" * 512),
        ({"model": 7}, 400, ""),
        ({"prompt": []}, 400, BASE),
    ],
)
def test_a_refusal_is_logged_with_the_model_asked_for_in_one_word(
    edge: RunningEdge, caplog: pytest.LogCaptureFixture, fields: Any, status: int, asked: str
) -> None:
    caplog.set_level(logging.INFO, "serve_app")
    assert edge.complete(**fields).status_code == status
    (line,) = lines_of(edge, caplog)
    assert f" status={status} " in line
    assert f" asked={asked} model= checkpoint= adapter= " in line


def test_a_look_at_a_model_is_logged_with_its_name(edge: RunningEdge, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_app")
    with edge.http() as client:
        client.get("/models/made%2FUp")
    (line,) = lines_of(edge, caplog)
    assert " status=404 " in line
    assert " asked=made/Up model= " in line


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


class Losing:
    """The replicas of an edge, of which some are lost before or after the first token."""

    def __init__(self, edge: RunningEdge, before: int = 0, after: int = 0) -> None:
        self._edge, self._replicas = edge, edge.service.replicas
        self.before, self.after = before, after
        self.requests = 0

    async def generate(
        self, deployment: str, request: GenerateRequest, *, affinity: str
    ) -> AsyncGenerator[TokenDelta, None]:
        self.requests += 1
        if self.before:
            self.before -= 1
            raise ReplicaLost("The replica was lost.")
        async with aclosing(self._replicas.generate(deployment, request, affinity=affinity)) as deltas:
            async for delta in deltas:
                yield delta
                if self.after:
                    self.after -= 1
                    raise ReplicaLost("The replica was lost.")

    async def readiness(self, deployments: Collection[str]) -> Mapping[str, str | None]:
        return await self._replicas.readiness(deployments)

    def __enter__(self) -> Self:
        self._edge.service.replicas = self
        return self

    def __exit__(self, *exc: object) -> None:
        self._edge.service.replicas = self._replicas


def test_a_request_whose_replica_is_lost_before_its_first_token_is_sent_to_another_one_once(edge: RunningEdge) -> None:
    edge.script.says("from another")
    with Losing(edge, before=1) as replicas:
        assert edge.complete().json()["choices"][0]["text"] == "from another"
    assert replicas.requests == 2
    found = last_record(edge)
    assert (found.status, found.prompt_tokens) == (200, 2)
    with Losing(edge, before=2) as replicas:
        assert edge.complete().status_code == 503
    assert replicas.requests == 2
    assert last_record(edge).prompt_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_replica_is_lost_after_its_first_token_is_not_sent_again(
    edge: RunningEdge, stream: bool
) -> None:
    edge.script.says("abc")
    with Losing(edge, after=1) as replicas:
        edge.complete(stream=stream)
    assert replicas.requests == 1
    assert last_record(edge).status == 503


def test_a_checkpoint_that_keeps_changing_is_503(edge: RunningEdge) -> None:
    edge.checkpoints.held["tinker://r/sampler_weights/n"] = StoredCheckpoint("d")
    edge.script.reply = lambda request: [AdapterChanged("d")]
    response = edge.complete(model="tinker://r/sampler_weights/n")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "checkpoint_changed")
    assert len(edge.script.requests) == 2
