"""Whatever comes over a connection is answered, or the connection ends; and nothing is left behind."""

import gzip
import json
import socket
import struct
from itertools import pairwise

import httpx
import openai
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.harness import BASE, KEY, RunningEdge
from tests.support.wire import error, post_head

pytest_plugins = ("tests.support.edge_fixtures",)

RUN = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
JSON = "content-type: application/json"
BODY = json.dumps(
    {"model": BASE, "prompt": "h\u00e9 \U0001f600", "max_tokens": 1, "seed": 1}, ensure_ascii=False
).encode()
LENGTH = f"content-length: {len(BODY)}"
NO_HTTP = (400, b"Invalid HTTP request received.")  # the server's own: it never reached the application
Answer = tuple[int, bytes]


def post(*headers: str, body: bytes = BODY) -> bytes:
    return post_head("/v1/completions", *headers) + body


def talk(edge: RunningEdge, content: bytes) -> list[Answer]:
    """Send it all, and read until the server closes: it has to, since the last request asks for it or is no request."""
    received = b""
    with edge.raw() as connection:
        connection.sendall(content)
        while more := connection.recv(65536):
            received += more
    found = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").lower().split("\r\n")
        length = int(dict(line.split(": ", 1) for line in lines)["content-length"])
        found.append((int(status.split()[1]), rest[:length]))
        received = rest[length:]
    return found


def check_all_is_well(edge: RunningEdge) -> None:
    edge.wait_until_idle()
    assert edge.complete(max_tokens=1).status_code == 200


def chunked(*parts: bytes, extension: bytes = b"") -> bytes:
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n"


# --- how long a body is ---


@RUN
@given(cuts=st.lists(st.integers(1, len(BODY) - 1), max_size=12))
def test_a_chunked_body_is_the_same_wherever_it_is_cut(edge: RunningEdge, cuts: list[int]) -> None:
    edge.script.says("ok")
    edges = [0, *sorted(set(cuts)), len(BODY)]
    parts = [BODY[start:end] for start, end in pairwise(edges)]
    ((status, body),) = talk(
        edge, post(JSON, "transfer-encoding: chunked", "connection: close", body=chunked(*parts) + b"\r\n")
    )
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "o")


def test_chunk_extensions_and_trailers_mean_nothing(edge: RunningEdge) -> None:
    body = chunked(BODY, extension=b";name=value") + b"authorization: Bearer x\r\n\r\n"
    ((status, _),) = talk(edge, post(JSON, "transfer-encoding: chunked", "connection: close", body=body))
    assert status == 200


@pytest.mark.parametrize(
    "headers",
    [
        ("transfer-encoding: chunked", LENGTH),
        (LENGTH, "transfer-encoding: chunked"),
        (LENGTH, LENGTH),
        (LENGTH, "content-length: 3"),
        ("content-length: -1",),
        (f"content-length: +{len(BODY)}",),
        ("content-length: 0x10",),
        ("content-length: ",),
        ("content-length: 1 1",),
        (f"content-length: {2**64 + len(BODY)}",),
        ("content-length: " + "9" * 400,),
        ("transfer-encoding: gzip",),
        ("transfer-encoding: chunked, identity",),
    ],
)
def test_a_length_that_can_be_read_in_two_ways_is_refused(edge: RunningEdge, headers: tuple[str, ...]) -> None:
    assert talk(edge, post(JSON, *headers)) == [NO_HTTP]
    assert edge.script.requests == []
    check_all_is_well(edge)


@pytest.mark.parametrize(
    "body", [b"zz\r\n{}", b"-2\r\n{}\r\n0\r\n\r\n", b"2\r\n{}}\r\n0\r\n\r\n", b"1" * 20 + b"\r\n{}"]
)
def test_chunks_that_are_none_are_refused(edge: RunningEdge, body: bytes) -> None:
    assert talk(edge, post(JSON, "transfer-encoding: chunked", body=body)) == [NO_HTTP]
    check_all_is_well(edge)


def test_what_follows_a_body_that_is_longer_than_declared_is_no_request(edge: RunningEdge) -> None:
    answers = talk(edge, post(JSON, f"content-length: {len(BODY) - 1}"))
    assert answers[-1] == NO_HTTP
    assert edge.script.requests == []


def test_a_body_without_a_length_is_empty(edge: RunningEdge) -> None:
    ((status, body),) = talk(edge, post(JSON, "connection: close", body=b""))
    message = "The request body is not valid JSON: EOF while parsing a value at line 1 column 0."
    assert (status, json.loads(body)) == (400, error(message))


# --- several requests on a connection ---


def test_pipelined_requests_are_answered_in_order(edge: RunningEdge) -> None:
    edge.script.says("ok")
    stream = json.dumps({"model": BASE, "prompt": "x", "temperature": -1}).encode()
    requests_ = [
        post(JSON, LENGTH),
        post(JSON, f"content-length: {len(stream)}", body=stream),
        post("content-type: text/plain", LENGTH),
        post(JSON, LENGTH).replace(KEY.encode(), b"nobody"),
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n",
        post(JSON, LENGTH, "connection: close"),
    ]
    answers = talk(edge, b"".join(requests_))
    assert [status for status, _ in answers] == [200, 400, 415, 401, 200, 200]
    assert len(edge.script.requests) == 2


def test_a_pipelined_request_waits_for_the_stream_before_it(edge: RunningEdge) -> None:
    edge.script.says("ok")
    body = json.dumps({"model": BASE, "prompt": "x", "stream": True}).encode()
    both = post(JSON, f"content-length: {len(body)}", body=body) + post(JSON, LENGTH, "connection: close")
    received = b""
    with edge.raw() as connection:
        connection.sendall(both)
        while more := connection.recv(65536):
            received += more
    first, second = received.split(b"HTTP/1.1 200 OK")[1:]
    assert first.count(b"data: [DONE]") == 1
    assert b'"object":"text_completion"' in second


# --- what is not a request, or not all of it ---


@RUN
@given(content=st.binary(min_size=1, max_size=200))
def test_noise_is_answered_by_400_or_by_nothing(edge: RunningEdge, content: bytes) -> None:
    with edge.raw() as connection:
        connection.sendall(content + b"\r\n\r\n\0\r\n\r\n")  # no line of a request is a NUL
        received = connection.recv(65536)
    assert received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"HTTP/1.1 404 ")), received


@RUN
@given(end=st.integers(1, len(post(JSON, LENGTH)) - 1), hard=st.booleans())
def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(edge: RunningEdge, end: int, hard: bool) -> None:
    with edge.raw() as connection:
        if hard:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(post(JSON, LENGTH)[:end])
    edge.wait_until_idle()
    assert edge.script.requests == []


@pytest.mark.parametrize(
    "line",
    [
        "x-a: \0b",
        "x-a: b\r\n folded",
        "x-a : b",
        "no colon",
        ": no name",
        "x-\xe9: b",
    ],
)
def test_a_header_that_is_none_is_refused(edge: RunningEdge, line: str) -> None:
    assert talk(edge, post(JSON, line, LENGTH)) == [NO_HTTP]
    check_all_is_well(edge)


@pytest.mark.parametrize("headers", [["x-a: " + "b" * 100_000], [f"x-{i}: b" for i in range(2000)]])
def test_large_heads_do_no_harm(edge: RunningEdge, headers: list[str]) -> None:
    ((status, _),) = talk(edge, post(JSON, *headers, LENGTH, "connection: close"))
    assert status == 200


def test_a_body_that_comes_byte_by_byte_is_read(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(content := post(JSON, LENGTH))):
            connection.sendall(content[index : index + 1])
        assert connection.recv(12) == b"HTTP/1.1 200"


# --- what is declared wrongly ---


@pytest.mark.parametrize("codings", [["gzip"], ["identity", "gzip"], ["gzip, identity"], ["br"], ["deflate"], ["\xff"]])
def test_a_coded_body_is_415_however_it_is_declared(edge: RunningEdge, codings: list[str]) -> None:
    content = gzip.compress(BODY)
    headers = [f"content-encoding: {coding}" for coding in codings]
    ((status, body),) = talk(
        edge, post(JSON, *headers, f"content-length: {len(content)}", "connection: close", body=content)
    )
    assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("headers", [[], ["content-encoding: identity"], ["transfer-encoding: gzip, chunked"]])
def test_a_compressed_body_that_does_not_say_so_is_no_json(edge: RunningEdge, headers: list[str]) -> None:
    content = gzip.compress(BODY)
    if "chunked" in "".join(headers):
        request = post(JSON, *headers, "connection: close", body=chunked(content) + b"\r\n")
    else:
        request = post(JSON, *headers, f"content-length: {len(content)}", "connection: close", body=content)
    message = "The request body is not valid JSON: expected value at line 1 column 1."
    ((status, body),) = talk(edge, request)
    assert (status, json.loads(body)) == (400, error(message))


@pytest.mark.parametrize("token", ["h2c", "foo"])
def test_a_body_that_is_lost_with_an_upgrade_says_so(edge: RunningEdge, token: str) -> None:
    upgrade = ("connection: upgrade, http2-settings, close", f"upgrade: {token}", "http2-settings: AAMAAABkAAQAAP__")
    ((status, body),) = talk(edge, post(JSON, *upgrade, LENGTH))
    message = f"The request body was lost with an attempt to upgrade the connection; send no Upgrade, got {token!r}."
    assert (status, json.loads(body)) == (400, error(message))


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/completions", "/healthz"])
def test_a_websocket_is_refused_in_the_error_shape(edge: RunningEdge, path: str) -> None:
    with pytest.raises(InvalidStatus) as caught, connect(f"ws://127.0.0.1:{edge.port}{path}"):
        pass
    response = caught.value.response
    message = "WebSockets are not supported; send requests over HTTP."
    assert (response.status_code, json.loads(response.body or b"")) == (404, error(message, code="not_found"))
    assert len(response.headers["x-request-id"]) == 32


# --- large bodies and real clients ---


@pytest.mark.slow
@pytest.mark.parametrize("key", [KEY, "nobody"])
def test_clients_that_send_50_megabytes_read_why_not(edge: RunningEdge, key: str) -> None:
    content = json.dumps({"model": BASE, "prompt": "x" * 50_000_000}).encode()
    pieces = [content[start : start + 65536] for start in range(0, len(content), 65536)]
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    expected = 413 if key == KEY else 401
    url = f"{edge.url}/completions"
    assert httpx.post(url, content=content, headers=headers, verify=False).status_code == expected
    assert httpx.post(url, content=iter(pieces), headers=headers, verify=False).status_code == expected
    assert requests.post(url, data=content, headers=headers, timeout=30).status_code == expected
    assert requests.post(url, data=iter(pieces), headers=headers, timeout=30).status_code == expected
    with pytest.raises(openai.APIStatusError) as caught:
        edge.sdk(key).completions.create(model=BASE, prompt="x" * 50_000_000)
    assert caught.value.status_code == expected
    check_all_is_well(edge)
