"""The request body: what is JSON here, and what it may cost."""

import asyncio
import gc
import json
import re
import select
import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.bodies.json_body import parse_object
from serve_app.base.errors import InvalidRequest
from serve_app.http.early_answer import EarlyAnswer
from tests.support.harness import BASE, RunningEdge
from tests.support.waiting import eventually
from tests.support.wire import error, post_head, read_response

pytest_plugins = ("tests.support.edge_fixtures",)

JSON = "content-type: application/json"


def send(edge: RunningEdge, content: bytes) -> Any:
    with edge.http() as client:
        return client.post("/completions", content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "The request body is not valid JSON: EOF while parsing a value at line 1 column 0."),
        (b'{"a": ', "The request body is not valid JSON: EOF while parsing a value at line 1 column 6."),
        (b'{"a": 1} x', "The request body is not valid JSON: trailing characters at line 1 column 10."),
        (b'{"a": NaN}', "The request body is not valid JSON: expected value at line 1 column 7."),
        (b'{"a": -Infinity}', "The request body is not valid JSON: invalid number at line 1 column 8."),
        (b'{"a": "\\ud800"}', "The request body is not valid JSON: unexpected end of hex escape at line 1 column 14."),
        (b'{"a": "\xff"}', "The request body is not valid JSON: invalid unicode code point at line 1 column 8."),
        (b'{"a":"\xed\xa0\x80"}', "The request body is not valid JSON: invalid unicode code point at line 1 column 7."),
        (b"[" * 300, "The request body is not valid JSON: recursion limit exceeded at line 1 column 202."),
        (b'{"a":' + b"9" * 5000, "The request body is not valid JSON: number out of range at line 1 column 4307."),
        (b"[]", "The request body must be a JSON object, got an array."),
        (b'"x"', "The request body must be a JSON object, got a string."),
        (b"1", "The request body must be a JSON object, got a number."),
        (b"true", "The request body must be a JSON object, got a boolean."),
        (b"null", "The request body must be a JSON object, got null."),
    ],
)
def test_what_is_no_json_object_is_400_with_the_place(edge: RunningEdge, content: bytes, message: str) -> None:
    response = send(edge, content)
    assert (response.status_code, response.json()) == (400, error(message))


def test_of_a_repeated_key_the_last_one_wins() -> None:
    assert parse_object(b'{"a": 1, "b": 2, "a": 3}') == {"a": 3, "b": 2}


def test_infinity_written_as_a_number_is_refused_in_its_field(edge: RunningEdge) -> None:
    response = send(edge, f'{{"model": "{BASE}", "prompt": "x", "temperature": 1e999}}'.encode())
    message = "temperature must be a finite number, got Infinity."
    assert (response.status_code, response.json()) == (400, error(message, param="temperature"))


def test_nul_characters_in_text_are_text(edge: RunningEdge) -> None:
    edge.script.says("ok")
    response = edge.complete("a\0b", echo=True, max_tokens=9)
    assert response.json()["choices"][0]["text"] == "a\0bok"


def test_a_body_that_says_it_is_too_large_is_413_before_it_is_sent(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        connection.sendall(
            post_head("/v1/completions", "content-type: application/json", "content-length: 99999999999")
        )
        status, headers, body = read_response(connection)
        assert connection.recv(1) == b"", "the connection must close: the body was not read"
    message = "The request body must have at most 8388608 bytes, got 99999999999."
    assert (status, headers["connection"]) == (413, "close")
    assert json.loads(body) == error(message, code="request_too_large")


def test_a_body_that_does_not_say_its_size_is_413_once_it_is_too_large(edge: RunningEdge) -> None:
    edge.reconfigure(limits={"body_bytes": 1000})
    try:
        chunk = b"3e8\r\n" + b" " * 1000 + b"\r\n"
        with edge.raw() as connection:
            connection.sendall(
                post_head("/v1/completions", "content-type: application/json", "transfer-encoding: chunked") + chunk * 2
            )
            status, _, body = read_response(connection)
    finally:
        edge.reconfigure()
    assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


REFUSED_EARLY = {
    "too large": (413, post_head("/v1/completions", JSON, "content-length: 20000000")),
    "no JSON": (415, post_head("/v1/completions", "content-length: 20000000")),
    "no such path": (404, post_head("/v1/nowhere", JSON, "content-length: 20000000")),
    "wrong key": (401, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n"),
    "the last": (404, post_head("/v1/nowhere", JSON, "connection: close", "content-length: 20000000")),
    "chunked": (404, post_head("/v1/nowhere", JSON, "transfer-encoding: chunked") + b"1312d00\r\n"),
}


@pytest.mark.parametrize("kind", REFUSED_EARLY)
def test_who_sends_everything_before_reading_gets_the_refusal_whole(edge: RunningEdge, kind: str) -> None:
    expected, head = REFUSED_EARLY[kind]
    with edge.raw() as connection:
        connection.sendall(head + b" " * 1000)
        eventually(lambda: edge.recorder.ended)  # it is answered
        for _ in range(20):
            connection.sendall(b" " * 999_950)
        if kind == "chunked":
            connection.sendall(b"\r\n0\r\n\r\n")
        status, headers, body = read_response(connection)
        assert connection.recv(1) == b"", "the connection must close: it could have been any number of bytes"
    assert (status, headers["connection"]) == (expected, "close")
    assert set(json.loads(body)) == {"error"}


def test_a_refusal_before_a_small_body_leaves_the_connection_for_the_next_request(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        for _ in range(3):
            connection.sendall(post_head("/v1/nowhere", JSON, "content-length: 1000") + b" " * 500)
            status, headers, _ = read_response(connection)
            assert (status, "connection" in headers) == (404, False)
            connection.sendall(b" " * 500)


def test_who_keeps_the_body_back_after_a_refusal_is_let_go(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        connection.sendall(post_head("/v1/nowhere", JSON, "content-length: 1000", "expect: 100-continue"))
        status, headers, _ = read_response(connection)
        assert connection.recv(1) == b""
    assert (status, headers["connection"]) == (404, "close")


def test_nobody_is_read_from_for_ever() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"transfer-encoding", b"chunked")]}
    asyncio.run(asyncio.wait_for(EarlyAnswer(app, total_s=0.05)(scope, receive, send), 10))
    assert [message.get("more_body", False) for message in sent] == [False, True, False]


def test_refused_senders_take_no_more_than_some_of_the_requests_that_serve_lets_in(edge: RunningEdge) -> None:
    with ExitStack() as stack:
        waiting = [stack.enter_context(edge.raw()) for _ in range(70)]
        for connection in waiting:
            connection.sendall(post_head("/v1/nowhere", JSON, "transfer-encoding: chunked"))
        eventually(lambda: len(edge.recorder.ended) == 70)
        for connection in waiting:
            assert read_response(connection)[0] == 404
        eventually(lambda: num_closed(waiting) >= 6)
        assert num_closed(waiting) == 6, "the other 64 get two seconds"
        assert edge.complete(max_tokens=1).status_code == 200


def num_closed(connections: list[socket.socket]) -> int:
    return len(select.select(connections, [], [], 0)[0])  # all that came was read: what can be read is the end


def test_a_body_that_comes_too_slowly_is_400_and_the_connection_closes(edge: RunningEdge) -> None:
    edge.reconfigure(limits={"body_timeout_s": 0.2})
    try:
        with edge.raw() as connection:
            connection.sendall(
                post_head("/v1/completions", "content-type: application/json", "content-length: 10") + b"{"
            )
            started = time.monotonic()
            status, headers, body = read_response(connection)
            waited = time.monotonic() - started
    finally:
        edge.reconfigure()
    assert (status, headers["connection"]) == (400, "close")
    assert json.loads(body) == error("The request body did not arrive within 0.2 s.")
    assert 0.15 < waited < 5


def test_a_client_that_leaves_while_it_sends_the_body_leaves_nothing_behind(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        connection.sendall(post_head("/v1/completions", "content-type: application/json", "content-length: 10") + b"{")
    edge.wait_until_idle()
    assert edge.script.requests == []


def test_a_body_of_megabytes_is_read_and_judged_by_its_tokens(edge: RunningEdge) -> None:
    prompt = list(range(300)) * 2000
    response = edge.post("/completions", model=BASE, prompt=prompt)
    message = "prompt must have fewer tokens than the longest context window here of 4096, got 600000."
    assert response.json() == error(message, param="prompt", code="context_length_exceeded")


@pytest.mark.parametrize("content", [b'{"a": 1' + b"0" * 400 + b"}", b'{"a": ' + b'{"b":' * 150 + b"1" + b"}" * 151])
def test_odd_but_valid_json_is_read(content: bytes) -> None:
    assert set(parse_object(content)) == {"a"}


def test_lone_surrogates_are_refused_wherever_they_stand() -> None:
    for content in (b'{"\\udfff": 1}', b'{"a": "\\ud83d"}', b'{"a": "\\ud83d\\u0041"}'):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            parse_object(content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{}] * 5000}, "messages must have at most 4096 items, got 5000."),
        (
            {"messages": [{"content": [{}] * 2500}] * 2},
            "messages must have at most 4096 items of content in all, got 5000.",
        ),
        (
            {"messages": [{"tool_calls": [{}] * 50}] * 100},
            "messages must have at most 4096 items of tool_calls in all, got 5000.",
        ),
        ({"tools": [{}] * 600}, "tools must have at most 512 items, got 600."),
        ({"stop": [{}] * 300}, "stop must have at most 256 items, got 300."),
        ({"logit_bias": {str(i): 1 for i in range(1100)}}, "logit_bias must have at most 1024 items, got 1100."),
    ],
)
def test_how_much_a_request_holds_is_judged_before_each_part_of_it(
    edge: RunningEdge, fields: Any, message: str
) -> None:
    response = edge.post("/chat/completions", **fields)
    assert (response.status_code, response.json()) == (400, error(message, param=message.split(" ")[0]))


def test_a_body_of_very_many_small_values_is_refused_unread(edge: RunningEdge) -> None:
    response = send(edge, b"[" + b"[]," * 1_000_000 + b"0]")
    message = "The request body must have at most 100000 values that are read, got 2000002."
    assert (response.status_code, response.json()) == (400, error(message))


@pytest.mark.parametrize("collecting", [True, False])
def test_reading_a_body_leaves_the_garbage_collector_as_it_was(collecting: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        parse_object(b'{"a": [[], []]}')
        with pytest.raises(InvalidRequest):
            parse_object(b"[")
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("text", ["hello world ", "a", "日本 "])
def test_a_text_of_megabytes_is_refused_without_being_tokenised_as_a_whole(edge: RunningEdge, text: str) -> None:
    prompt = text * (4_000_000 // len(text.encode()))
    for response in (edge.complete(prompt), edge.chat(prompt)):
        message = response.json()["error"]["message"]
        found = re.fullmatch(
            r"(prompt|messages) must have fewer tokens than the model's context window of 4096, "
            r"got at least (\d+) \(counting stopped there\)\.",
            message,
        )
        assert found is not None, message
        assert int(found[2]) < 20_000


def test_a_long_text_that_fits_is_served(edge: RunningEdge) -> None:
    prompt = " the capital of France" * 900
    assert len(prompt) > 4096
    assert edge.complete(prompt, max_tokens=1).status_code == 200
    assert edge.chat(prompt, max_tokens=1).status_code == 200


@pytest.mark.parametrize("where", ["reasoning", "arguments", "tools"])
def test_what_a_template_may_drop_is_bounded_too(edge: RunningEdge, where: str) -> None:
    big = "x" * 200_000
    user: Any = {"role": "user", "content": "x"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": big})}}
    messages, tools = {
        "reasoning": ([{"role": "assistant", "content": "", "reasoning_content": big}, user], None),
        "arguments": ([{"role": "assistant", "tool_calls": [call]}, user], None),
        "tools": ([user], [{"type": "function", "function": {"name": "f", "description": big}}]),
    }[where]
    response = edge.post("/chat/completions", model="tiny/Chat", messages=messages, tools=tools)
    said = "messages and tools must have at most 131072 characters of reasoning, arguments and declarations, got 200"
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(said)


def test_of_many_faults_only_the_first_is_looked_for(edge: RunningEdge) -> None:
    response = edge.post("/chat/completions", model="m", messages=[{"role": "x"}] * 4096)
    assert response.json()["error"]["param"] == "messages[0].role"
