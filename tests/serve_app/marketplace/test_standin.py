"""The stand-in upstream itself: what it sends is what its behaviours say, and it sees what its clients do."""

import json
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.marketplace.upstream import Upstream, running_upstream, upstream_process
from tests.support.marketplace.upstream_behaviours import BEHAVIOURS
from tests.support.marketplace.upstream_replies import TEXTS, Act, Asked, Reset, Stream, Wait
from tests.support.processes.bad_ports import closed_port, silent_port
from tests.support.processes.certificates import self_signed
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.marketplace.upstream_fixtures",)

ASKED = {"model": "theirs", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}


def post(url: str, path: str = "/completions", **fields: Any) -> httpx.Response:
    return httpx.post(url + path, json=ASKED | fields, timeout=30, headers={"authorization": "Bearer sk-up"})


@contextmanager
def streaming(url: str) -> Iterator[httpx.Response]:
    with httpx.stream("POST", f"{url}/completions", json=ASKED, timeout=30) as response:
        yield response


def raw(port: int, body: dict[str, Any] = ASKED) -> socket.socket:
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
    return connection


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="k", max_retries=0, http_client=openai.DefaultHttpxClient(verify=False))


WELL_FORMED = [
    *("normal", "usage-beside-last", "usage-with-text", "usage-every", "usage-every-but-own", "usage-never"),
    *("usage-unasked", "finish-with-text", "no-finish", "no-done", "comments", "crlf", "cr", "bom", "multi-line"),
    *("no-space", "fields", "bytewise", "unknown-fields", "no-length", "gzip", "deflate", "closes-after"),
]


@pytest.mark.parametrize("name", WELL_FORMED)
def test_every_shape_of_a_stream_holds_the_same_text(server: Upstream, name: str) -> None:
    text = post(server.url_as(name)).text.removeprefix("\ufeff")
    events = [event for event in "\n".join(text.splitlines()).split("\n\n") if event]
    data = ["\n".join(line[5:] for line in event.split("\n") if line.startswith("data:")) for event in events]
    chunks = [json.loads(each) for each in data if each.strip() != "[DONE]"]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "".join(TEXTS)
    assert {chunk["model"] for chunk in chunks} == {"theirs"}
    assert (data[-1].strip() == "[DONE]") is (name != "no-done")


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("normal", [None, None, None, None, 3]),
        ("usage-beside-last", [None, None, None, 3]),
        ("usage-with-text", [None, None, 3]),
        ("usage-every", [1, 2, 3, 3, 3]),
        ("usage-every-but-own", [1, 2, 3, 3]),
        ("usage-never", [None, None, None, None]),
    ],
)
def test_usage_comes_where_the_behaviour_says(server: Upstream, name: str, counted: list[int | None]) -> None:
    with sdk(server.url_as(name)) as client:
        options: Any = {"include_usage": True}
        chunks = client.completions.create(model="m", prompt="x", stream=True, stream_options=options)
        assert [chunk.usage.completion_tokens if chunk.usage else None for chunk in chunks] == counted


def test_the_sdk_reads_chats(server: Upstream) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    with sdk(server.url) as client:
        chunks = list(client.chat.completions.create(model="m", messages=messages, stream=True))
        whole = client.chat.completions.create(model="m", messages=messages)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(TEXTS)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["stop"]
    assert whole.choices[0].message.content == "".join(TEXTS)


def test_requests_are_kept_as_they_came(server: Upstream) -> None:
    content = b'{"model": "m",  "stream":false, "x": 0.10}'
    with httpx.Client(base_url=server.url, headers={"X-One": "1"}) as client:
        for _ in range(2):
            client.post("/completions", content=content)
    first, second = server.received
    assert (first.method, first.path, first.body) == ("POST", "/v1/completions", content)
    assert (first.header("x-one"), first.turn, second.turn) == ("1", 1, 2)
    assert first.connection == second.connection


def test_it_holds_the_rest_until_it_is_released(server: Upstream) -> None:
    server.behaves("stall")
    with streaming(server.url) as response:
        lines = response.iter_lines()
        assert [json.loads(next(line for line in lines if line)[6:])["choices"][0]["text"] for _ in "12"] == [
            *TEXTS[:2]
        ]
        eventually(lambda: server.received[0].waits == 1)
        assert server.received[0].ended_at is None
        server.release()
        assert "data: [DONE]" in list(lines)
    assert server.received[0].over.wait(10)
    assert server.received[0].left_at is None


def test_a_client_that_leaves_is_noticed(server: Upstream) -> None:
    server.behaves("hang")
    with raw(server.port) as connection:
        assert connection.recv(1)
        assert server.received[0].left_at is None
    assert server.received[0].left.wait(10)
    eventually(lambda: server.open_connections == 0)


def test_a_client_that_does_not_read_holds_it_up(server: Upstream) -> None:
    server.behaves("endless-stream")
    with raw(server.port):
        eventually(lambda: server.received and server.received[0].sent_bytes > 0)
        sent = -1
        while sent != server.received[0].sent_bytes:
            sent = server.received[0].sent_bytes
            assert not server.received[0].left.wait(0.2)
    assert server.received[0].left.wait(10)


def test_a_reset_is_a_reset_and_a_cut_is_none(server: Upstream) -> None:
    server.behaves_next(Stream(until=1, then=(Wait(), Reset())), "cut")
    with raw(server.port) as connection:
        assert connection.recv(1 << 16)
        server.release()
        with pytest.raises(ConnectionResetError):
            all_of(connection)
    with raw(server.port) as connection:
        received = all_of(connection)
    assert received.count(b"data: ") == 2
    assert not received.endswith(b"0\r\n\r\n")


def test_a_second_request_finds_the_connection_closed(server: Upstream) -> None:
    server.behaves("closes-on-reuse")
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/completions", json=ASKED).status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/completions", json=ASKED)


def test_the_bomb_grows_by_a_thousand(server: Upstream) -> None:
    server.behaves("gzip-bomb")
    packed, size, unpacking = 0, 0, zlib.decompressobj(31)
    with streaming(server.url) as response:
        for piece in response.iter_raw():
            packed, size = packed + len(piece), size + len(unpacking.decompress(piece))
            if size > 1 << 26:
                break
    assert size > 500 * packed


@pytest.mark.parametrize(("name", "shown"), [("echo-400", "Bad key: 'Bearer sk-up'"), ("echo-events", "sk-up ran out")])
def test_it_gives_the_key_away(server: Upstream, name: str, shown: str) -> None:
    response = post(server.url_as(name))
    assert shown in response.text
    assert response.headers["x-echo"] == "Bearer sk-up"


@pytest.mark.parametrize("name", [name for name in BEHAVIOURS if name.isdecimal()])
def test_statuses_are_as_named(server: Upstream, name: str) -> None:
    response = post(server.url_as(name))
    assert response.status_code == int(name)
    assert ("location" in response.headers) is (300 <= int(name) < 400)


def test_a_port_goes_down_and_comes_back(server: Upstream) -> None:
    server.go_down()
    with pytest.raises(httpx.ConnectError):
        post(server.url)
    server.come_back()
    assert post(server.url).status_code == 200


def test_ports_that_refuse_and_ports_that_say_nothing() -> None:
    with closed_port() as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)
    with silent_port() as port, pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.2)


def test_a_process_of_its_own_is_told_and_asked_by_http() -> None:
    with upstream_process("stall") as process:
        with streaming(process.url) as response:
            process.release()
            assert response.read().endswith(b"data: [DONE]\n\n")
        process.behaves("503")
        assert post(process.url).status_code == 503
        assert [each["path"] for each in process.control()["received"]] == ["/v1/completions"] * 2
        process.kill()
        with pytest.raises(httpx.ConnectError):
            post(process.url)


def test_it_speaks_tls(tmp_path: Path) -> None:
    with running_upstream(certificate=self_signed(tmp_path, "localhost")) as server:
        response = httpx.post(f"{server.url}/completions", json=ASKED, verify=False)
    assert response.status_code == 200


def test_a_behaviour_that_fails_fails_the_test() -> None:
    def fails(asked: Asked) -> Iterator[Act]:
        raise KeyError("no such text")

    fault = pytest.raises(AssertionError, match="no such text")
    with fault, running_upstream(fails) as server, raw(server.port) as connection:
        assert all_of(connection) == b""
