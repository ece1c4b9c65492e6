"""Section 4 of the contract: streams."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from engines.interface.errors import EngineStopped, NonFiniteLogits, QueueFull
from serve_app.api.record import Outcome
from tests.support.harness import BASE, CHAT, KEEP_ALIVE_S, KEY, RunningEdge
from tests.support.wire import error, post_head

pytest_plugins = ("tests.support.edge_fixtures",)

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def chat_events(edge: RunningEdge, **fields: Any) -> list[Any]:
    return edge.events(edge.chat(stream=True, **fields))


def text_events(edge: RunningEdge, **fields: Any) -> list[Any]:
    return edge.events(edge.complete(stream=True, **fields))


def choices(events: list[Any]) -> list[Any]:
    return [event["choices"][0] for event in events if event != "[DONE]" and event["choices"]]


def test_a_chat_stream_is_role_then_deltas_then_the_reason_then_done(edge: RunningEdge) -> None:
    edge.script.says("ab")
    *events, done = chat_events(edge)
    assert done == "[DONE]"
    assert [choice["delta"] for choice in choices(events)] == [
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"content": "a", "reasoning_content": None},
        {"content": "b", "reasoning_content": None},
        {"content": None, "reasoning_content": None},
    ]
    assert [choice["finish_reason"] for choice in choices(events)] == [None, None, None, "stop"]
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert all("usage" not in event for event in events)


def test_a_text_stream_ends_with_the_reason_on_its_last_text(edge: RunningEdge) -> None:
    edge.script.says("ab")
    *events, done = text_events(edge)
    assert done == "[DONE]"
    assert choices(events) == [
        {"index": 0, "text": "a", "finish_reason": None, "logprobs": None},
        {"index": 0, "text": "b", "finish_reason": None, "logprobs": None},
        {"index": 0, "text": "", "finish_reason": "stop", "logprobs": None},
    ]
    assert all(event["object"] == "text_completion" for event in events)


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_all_chunks_share_id_created_and_model(edge: RunningEdge, path: str) -> None:
    edge.script.says("abcdef")
    response = getattr(edge, path)(stream=True, stream_options={"include_usage": True})
    events = edge.events(response)[:-1]
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_usage_comes_in_a_last_chunk_of_its_own_if_asked_for(edge: RunningEdge, path: str) -> None:
    edge.script.says("abc")
    *events, last, done = edge.events(getattr(edge, path)(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert (last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        4,
        4 + last["usage"]["prompt_tokens"],
    )
    assert all(event["usage"] is None for event in events)


def test_what_a_client_concatenates_is_sent_once(edge: RunningEdge) -> None:
    edge.script.says(f"<think>\nHmm\n</think>\n\nHi{CALL}{CALL}")
    deltas = [choice["delta"] for choice in choices(chat_events(edge, tools=TOOLS))]
    assert [delta["role"] for delta in deltas if "role" in delta] == ["assistant"]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}] * 2
    assert all("reasoning_content" in delta for delta in deltas)


def test_the_sdk_puts_a_stream_together(edge: RunningEdge) -> None:
    edge.script.says(f"<think>\nHmm\n</think>\n\nHi{CALL}")
    reasoning = content = ""
    messages: Any = [{"role": "user", "content": "x"}]
    with edge.sdk().chat.completions.stream(model=CHAT, messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
        for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                reasoning += event.chunk.choices[0].delta.reasoning_content or ""  # type: ignore[attr-defined]
                content += event.chunk.choices[0].delta.content or ""
        final = stream.get_final_completion().choices[0]
    assert (reasoning, content) == ("Hmm", "Hi")
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == '{"a": 1}'


def test_the_async_sdk_reads_many_streams_at_once(edge: RunningEdge) -> None:
    edge.script.says("abcdef")

    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.completions.create(model=BASE, prompt="x", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def many() -> list[str]:
        async with edge.async_sdk() as client:
            return await asyncio.gather(*(one(client) for _ in range(20)))

    assert asyncio.run(many()) == ["abcdef"] * 20


def test_each_chunk_has_its_own_ids_and_the_first_the_prompts(edge: RunningEdge) -> None:
    edge.script.says("日b")
    for events in (chat_events(edge, return_token_ids=True), text_events(edge, return_token_ids=True)):
        found = choices(events)
        ids = [token for choice in found for token in choice["token_ids"]]
        assert ids == [*edge.script.encode("日b"), edge.script.end]
        assert ["prompt_token_ids" in choice for choice in found] == [True] + [False] * (len(found) - 1)


def test_text_offsets_count_over_all_chunks(edge: RunningEdge) -> None:
    edge.script.says("a日b")
    found = choices(text_events(edge, logprobs=0))
    assert [offset for choice in found for offset in choice["logprobs"]["text_offset"]] == [0, 1, 1, 1, 2, 3]


def test_a_stop_string_is_held_back_until_it_is_certain(edge: RunningEdge) -> None:
    edge.script.says("one ST", "OP")
    texts = [choice["text"] for choice in choices(text_events(edge, stop="STOP"))]
    assert "".join(texts) == "one "
    edge.script.says("one ST", "ART")
    texts = [choice["text"] for choice in choices(text_events(edge, stop="STOP"))]
    assert "".join(texts) == "one START"


def test_events_are_ascii_so_that_no_reader_splits_them(edge: RunningEdge) -> None:
    edge.script.says("a\u2028b\u0085c😀")
    response = edge.complete(stream=True)
    assert response.content.isascii()
    assert "".join(choice["text"] for choice in choices(edge.events(response))) == "a\u2028b\u0085c😀"


def test_in_a_stream_a_reply_turns_to_plain_text_at_the_point_of_its_error(edge: RunningEdge) -> None:
    broken = "<tool_call>\nbroken\n</tool_call>"
    edge.script.says(f"<think>\nHmm\n</think>\n\n{CALL}{broken} and {CALL}")
    found = choices(chat_events(edge, tools=TOOLS))
    assert "".join(choice["delta"]["reasoning_content"] or "" for choice in found) == "Hmm"
    assert sum(len(choice["delta"].get("tool_calls", [])) for choice in found) == 1
    assert "".join(choice["delta"]["content"] or "" for choice in found) == f"{broken} and {CALL}"
    assert found[-1]["finish_reason"] == "tool_calls"


def test_echo_comes_in_the_first_chunk(edge: RunningEdge) -> None:
    edge.script.says("Y")
    found = choices(text_events(edge, prompt="The 日", echo=True, logprobs=0))
    assert found[0]["text"] == "The 日"
    assert found[0]["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["text"] for choice in found) == "The 日Y"


# --- failures ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "header"),
    [
        (QueueFull(8), 429, "overloaded", ("retry-after", "2")),
        (EngineStopped("closing"), 503, "unavailable", ("retry-after", "1")),
        (NonFiniteLogits("layer 3"), 500, "non_finite_logits", ("x-should-retry", "false")),
    ],
)
def test_a_failure_before_the_first_token_is_a_status(
    edge: RunningEdge, failure: Any, status: int, code: str, header: tuple[str, str], stream: bool
) -> None:
    edge.script.reply = lambda request: [failure]
    for response in (edge.complete(stream=stream), edge.chat(stream=stream)):
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert response.headers[header[0]] == header[1]


@pytest.mark.parametrize("path", ["chat", "complete"])
def test_a_failure_after_it_is_an_error_event_and_never_done(edge: RunningEdge, path: str) -> None:
    edge.script.reply = lambda request: [*edge.script.encode("ab"), NonFiniteLogits("layer 3")]
    *events, last = edge.events(getattr(edge, path)(stream=True))
    assert last == error("The model computed NaN or infinity.", "server_error", code="non_finite_logits")
    assert "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices(events)) == "ab"
    assert all(choice["finish_reason"] is None for choice in choices(events))


def test_the_sdk_raises_on_an_error_event(edge: RunningEdge) -> None:
    edge.script.reply = lambda request: [*edge.script.encode("ab"), EngineStopped("x")]
    stream = edge.sdk().completions.create(model=BASE, prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="The replica is stopping; try again"):
        list(stream)


def test_a_failure_after_the_first_token_of_a_whole_reply_is_a_status(edge: RunningEdge) -> None:
    edge.script.reply = lambda request: [*edge.script.encode("ab"), EngineStopped("x")]
    assert edge.complete().status_code == 503


def test_the_sdk_tries_again_when_the_queue_is_full_and_not_after_a_fault(edge: RunningEdge) -> None:
    edge.script.reply = lambda request: [NonFiniteLogits("x")]
    with pytest.raises(openai.InternalServerError):
        edge.sdk(max_retries=2).completions.create(model=BASE, prompt="x")
    assert len(edge.script.requests) == 1
    replies = iter([[QueueFull(1)], edge.script.encode("ok")])
    edge.script.reply = lambda request: next(replies)
    assert edge.sdk(max_retries=1).completions.create(model=BASE, prompt="x").choices[0].text == "ok"


def test_no_first_token_in_time_is_503(edge: RunningEdge) -> None:
    edge.reconfigure(limits={"first_token_timeout_s": 0.1})
    edge.run(pause(edge))
    try:
        response = edge.complete(stream=True)
    finally:
        edge.reconfigure()
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert response.json() == error("No token came within 0.1 s; try again.", "server_error", code="timeout")


async def pause(edge: RunningEdge) -> None:
    edge.engine.pause()


def read_events(edge: RunningEdge, until: bytes) -> bytes:
    """The raw body of a stream, up to a text in it."""
    body = b'{"model": "tiny/Base", "prompt": "x", "stream": true}'
    head = post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
    received = b""
    with edge.raw() as connection:
        connection.sendall(head + body)
        while until not in received:
            piece = connection.recv(65536)
            assert piece, received
            received += piece
    return received


def test_a_silent_stream_has_comments(edge: RunningEdge) -> None:
    edge.script.says_and_hangs("ab", edge.engine)
    started = time.monotonic()
    received = read_events(edge, b": keep-alive\n\n")
    assert time.monotonic() - started >= KEEP_ALIVE_S
    assert received.count(b"data: ") == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_ends(edge: RunningEdge, stream: bool) -> None:
    edge.script.says_and_hangs("ab", edge.engine)
    edge.reconfigure(limits={"total_timeout_s": 0.2})
    try:
        response = edge.complete(stream=stream)
    finally:
        edge.reconfigure()
    expected = error("The request took longer than 0.2 s.", "server_error", code="timeout")
    if stream:
        assert edge.events(response)[-1] == expected
    else:
        assert (response.status_code, response.json()) == (503, expected)
        assert response.headers["x-should-retry"] == "false"


def test_a_client_that_reads_too_slowly_is_told_so(edge: RunningEdge, caplog: pytest.LogCaptureFixture) -> None:
    # The prompt's log-probabilities are megabytes, more than the system takes for a client that does not read.
    body = json.dumps({"model": BASE, "prompt": [7] * 4000, "echo": True, "logprobs": 20, "stream": True}).encode()
    head = post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
    # Writing them takes a tenth of a second, on a busy machine more; by then the service must wait for the client.
    edge.reconfigure(limits={"total_timeout_s": 4})
    said = "The client reads too slowly: the reply was not read within 4 s."
    try:
        with edge.raw() as connection:
            connection.sendall(head + body)
            edge.run(wait_until(lambda: said in caplog.text))
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                piece = connection.recv(1 << 20)
                assert piece, received[-1000:]
                received += piece
    finally:
        edge.reconfigure()
    last = received.rpartition(b"data: ")[2].partition(b"\n")[0]
    assert json.loads(last) == error(said, "invalid_request_error", code="client_too_slow")
    edge.wait_until_idle()
    found = edge.recorder.ended[-1]
    assert (found.outcome, found.status, found.error_code) == (Outcome.UNREAD, 400, "client_too_slow")


def test_a_stream_of_a_key_without_places_left_is_429(edge: RunningEdge) -> None:
    keys = [{**edge.config["keys"][0], "limits": {"concurrency": 1}}]
    edge.run(pause(edge))
    edge.reconfigure(keys=keys)
    try:
        with edge.raw() as first:
            body = b'{"model": "tiny/Base", "prompt": "x"}'
            head = post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
            first.sendall(head + body)
            edge.run(wait_until(lambda: bool(edge.script.requests)))
            response = edge.complete(stream=True)
    finally:
        edge.reconfigure()
    message = "This key may run 1 requests at a time; that many are running."
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json() == error(message, "rate_limit_error", code="rate_limit_exceeded")


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.005)


def test_a_key_used_up_is_429_with_the_time_to_wait(edge: RunningEdge) -> None:
    edge.reconfigure(keys=[{**edge.config["keys"][0], "limits": {"tokens_per_minute": 60}}])
    try:
        assert edge.complete([1] * 60, max_tokens=10).status_code == 200
        response = edge.complete()
    finally:
        edge.reconfigure()
    assert response.status_code == 429
    assert 9 <= int(response.headers["retry-after"]) <= 10
    assert KEY not in response.text
