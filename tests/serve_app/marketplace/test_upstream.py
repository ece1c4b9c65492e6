"""The client of an upstream against real servers that behave badly in every way."""

import asyncio
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import UpstreamFailed, UpstreamLost, UpstreamRefused
from serve_app.config.marketplace import TokenBounds, UpstreamConfig
from serve_app.marketplace.bounds import Bounds, PromptSize
from serve_app.marketplace.outgoing import outgoing
from serve_app.marketplace.relay import Relay, Used
from serve_app.marketplace.secret import Secret
from serve_app.marketplace.upstream import Upstream
from tests.support.marketplace.upstream import Received, running_upstream
from tests.support.marketplace.upstream import Upstream as Server
from tests.support.marketplace.upstream_behaviours import LARGE
from tests.support.marketplace.upstream_replies import TEXTS, Act, Close, Forever, Reset, Stream, head, says
from tests.support.processes.bad_ports import closed_port, silent_port
from tests.support.processes.certificates import self_signed
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.marketplace.upstream_fixtures",)

KEY = "sk-of-the-upstream"
BODY = json.dumps({"model": "acme/tri", "prompt": "x", "stream": True, "price": {}, "extra": {"a": 1}}).encode()
LIMITS = {"connect_timeout_s": 0.3, "first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3, "total_timeout_s": 5.0}
PATIENT = {name: 30.0 for name in LIMITS}


def upstream(url: str, **options: Any) -> Upstream:
    raw = {"url": url, "model": "theirs", "allow_private": True, **LIMITS, **options}
    return Upstream(UpstreamConfig.model_validate(raw), KEY)


class Client:
    """What a client got so far."""

    def __init__(self, *, wants_usage: bool = False) -> None:
        bounds = Bounds.of(PromptSize.of(BODY, ()), None, 1, TokenBounds())
        self.relay = Relay("acme/tri", bounds, wants_usage=wants_usage, secret=Secret(KEY))
        self.got = b""

    async def ask(self, using: Upstream) -> None:
        body = outgoing(BODY, using.config, stream=True)
        async with using.open("/completions", body, stream=True) as reply:
            while events := await reply.read():
                self.got += self.relay.pass_on(events)
            self.got += self.relay.end()

    def ask_once(self, url: str, **options: Any) -> None:
        async def run() -> None:
            using = upstream(url, **options)
            try:
                await self.ask(using)
            finally:
                await using.close()

        asyncio.run(run())

    @property
    def text(self) -> str:
        chunks = [json.loads(line[6:]) for line in self.got.decode().split("\n\n") if line and line != "data: [DONE]"]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


SHAPES = [
    *("normal", "usage-beside-last", "usage-with-text", "usage-every", "usage-every-but-own", "usage-unasked"),
    *("finish-with-text", "no-done", "comments", "crlf", "cr", "bom", "multi-line", "no-space", "fields", "bytewise"),
    *("unknown-fields", "no-length", "gzip", "deflate", "closes-after"),
]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_reply_in_any_shape_arrives_the_same(server: Server, name: str, wants_usage: bool) -> None:
    client = Client(wants_usage=wants_usage)
    client.ask_once(server.url_as(name))
    assert client.text == "".join(TEXTS)
    assert client.got.endswith(b"data: [DONE]\n\n")
    assert client.got.count(b"[DONE]") == 1
    assert client.got.count(b'"prompt_tokens"') == wants_usage
    assert client.relay.used == Used(7, 2, 3)
    assert client.relay.finish_reason == "stop"
    assert b"theirs" not in client.got


def test_unknown_fields_keep_their_bytes(server: Server) -> None:
    client = Client()
    client.ask_once(server.url_as("unknown-fields"))
    assert client.got.count(b'"x_cost":0.10,"x_big":12345678901234567890123') == 4
    assert client.got.count(b'"x_seen":true') == 4


def test_an_event_of_a_megabyte(server: Server) -> None:
    client = Client()
    client.ask_once(server.url_as("large-event"))
    assert client.text == f"{LARGE} end"


def test_what_the_upstream_gets(server: Server) -> None:
    Client().ask_once(server.url)
    (received,) = server.received
    assert received.path == "/v1/completions"
    assert received.json() == {
        "model": "theirs",
        "prompt": "x",
        "stream": True,
        "extra": {"a": 1},
        "stream_options": {"include_usage": True},
    }
    assert {name.lower(): value for name, value in received.headers} == {
        "host": f"127.0.0.1:{server.port}",
        "authorization": f"Bearer {KEY}",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "content-length": str(len(received.body)),
        "user-agent": "roundhouse",
    }


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("whole", "The upstream did not stream."),
        ("error-first", "The upstream answered 500 (server_error)."),
        ("empty", "The upstream sent an empty stream."),
        ("done-only", "The upstream sent an empty stream."),
        ("cut-at-once", "The connection to the upstream failed: ServerDisconnectedError."),
        ("reset-at-once", "The connection to the upstream failed: ClientOSError."),
        ("cut-after-head", "The connection to the upstream failed: ClientPayloadError."),
        ("never-answers", "The upstream did not answer in time."),
        ("half-a-head", "The upstream did not answer in time."),
        ("slow-head", "The upstream did not answer in time."),
        ("slow-first-byte", "The upstream did not answer in time."),
        ("comments-first", "The upstream did not answer in time."),
        ("endless-headers", "The connection to the upstream failed: ClientResponseError."),
        ("long-header", "The connection to the upstream failed: ClientResponseError."),
        ("br", "The connection to the upstream failed: ClientResponseError."),
        ("gzip-lies", "The connection to the upstream failed: ClientPayloadError."),
        ("html-200", "The upstream answered with a page."),
        ("html-404", "The upstream answered 404."),
        ("html-502", "The upstream answered 502."),
        ("401", "The upstream answered 401 (invalid_request_error)."),
        ("429", "The upstream answered 429 (invalid_request_error)."),
        ("503", "The upstream answered 503 (invalid_request_error)."),
        *((str(status), f"The upstream answered {status}.") for status in (301, 302, 303, 307, 308)),
    ],
)
def test_a_failure_before_the_first_event_lets_another_endpoint_answer(server: Server, name: str, reason: str) -> None:
    client = Client()
    with pytest.raises(UpstreamFailed) as caught:
        client.ask_once(server.url_as(name))
    assert str(caught.value) == reason
    assert client.got == b""
    assert [received.path for received in server.received] == [f"/as/{name}/v1/completions"]  # and nowhere else


@pytest.mark.parametrize(("name", "seconds"), [("429-retry-after", 7), ("503-retry-after", 7)])
def test_how_long_the_upstream_wants_to_be_left_alone(server: Server, name: str, seconds: float) -> None:
    with pytest.raises(UpstreamFailed) as caught:
        Client().ask_once(server.url_as(name))
    assert caught.value.retry_after_s == seconds


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("400", 400, "The upstream says 400."),
        ("413", 413, "The upstream says 413."),
        ("422", 422, "The upstream says 422."),
        ("detail", 422, "seed: must be an int"),
        ("vllm-error", 400, "too long"),
        ("text-error", 400, "no"),
        ("empty-error", 400, "The endpoint refused the request."),
        ("not-utf8-error", 400, "The endpoint refused the request."),
        ("large-error", 400, "The endpoint refused the request."),
        ("echo-400", 400, "Bad key: 'Bearer ***'"),
    ],
)
def test_a_refusal_of_the_request_passes_through(server: Server, name: str, status: int, message: str) -> None:
    with pytest.raises(UpstreamRefused) as caught:
        Client().ask_once(server.url_as(name))
    assert (caught.value.status, str(caught.value)) == (status, message)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("error-mid", "The upstream sent an error during the reply."),
        ("cut", "The upstream ended its stream before the reply was complete."),
        ("cut-no-length", "The upstream ended its stream before the reply was complete."),
        ("cut-in-event", "The upstream ended its stream before the reply was complete."),
        ("reset", "The upstream ended its stream before the reply was complete."),
        ("hang", "The upstream was silent for too long."),
        ("stall", "The upstream was silent for too long."),
        ("comments-for-ever", "The upstream was silent for too long."),
        ("drip", "The upstream was silent for too long."),
        ("endless-event", "The upstream sent too much: an event has more than 4194304 bytes."),
        ("gzip-bomb", "The upstream sent too much: an event has more than 4194304 bytes."),
    ],
)
def test_a_failure_after_the_first_event_loses_the_rest_only(server: Server, name: str, reason: str) -> None:
    client = Client()
    with pytest.raises(UpstreamLost) as caught:
        client.ask_once(server.url_as(name))
    assert str(caught.value) == reason
    assert client.text
    assert "".join(TEXTS).startswith(client.text)
    assert b"[DONE]" not in client.got


@pytest.mark.parametrize("end", [Close(), Reset()])
def test_a_connection_that_breaks_after_the_reply_was_complete_loses_nothing(server: Server, end: Act) -> None:
    server.behaves(Stream(usage="never", done=False, until=4, then=(end,)))
    client = Client()
    client.ask_once(server.url)
    assert client.text == "".join(TEXTS)
    assert client.got.endswith(b"data: [DONE]\n\n")


def test_an_event_of_too_many_values_is_not_read(server: Server) -> None:
    server.behaves(Stream(until=1, then=('{"choices":[],"a":[' + "[]," * 100_000 + "1]}",)))
    with pytest.raises(UpstreamLost, match="or has too many values"):
        Client().ask_once(server.url)


def test_a_certificate_that_nobody_vouches_for_is_not_trusted(tmp_path: Path) -> None:
    with running_upstream(certificate=self_signed(tmp_path, "localhost")) as server:
        with pytest.raises(UpstreamFailed, match="ClientConnectorCertificateError"):
            Client().ask_once(server.url.replace("127.0.0.1", "localhost"))
        assert server.received == []


def test_a_reply_has_an_end(server: Server) -> None:
    with pytest.raises(UpstreamLost, match="took too long in all"):
        Client().ask_once(server.url_as("paced"), total_timeout_s=0.3)


def test_no_text_of_an_upstream_shows_its_key(server: Server) -> None:
    client = Client()
    with pytest.raises(UpstreamLost) as caught:
        client.ask_once(server.url_as("echo-events"))
    assert client.got.count(b"***") >= 2
    for name in ("echo-401", "echo-500", "echo-400"):
        with pytest.raises((UpstreamFailed, UpstreamRefused)) as refused:
            Client().ask_once(server.url_as(name))
        assert KEY not in repr((refused.value, refused.value.args))
    assert KEY not in repr((client.got, caught.value))


def test_nobody_at_the_address() -> None:
    with closed_port() as port, pytest.raises(UpstreamFailed, match="ClientConnectorError"):
        Client().ask_once(f"http://127.0.0.1:{port}/v1")
    with silent_port() as port, pytest.raises(UpstreamFailed, match="did not answer in time"):
        Client().ask_once(f"http://127.0.0.1:{port}/v1", first_byte_timeout_s=30.0)


def test_a_name_of_a_private_address_is_not_connected_to(server: Server) -> None:
    with pytest.raises(UpstreamFailed, match="is not at a public address"):
        Client().ask_once(f"http://localhost:{server.port}/v1", allow_private=False)
    assert server.received == []


def test_whole_replies(server: Server) -> None:
    for name in ("normal", "gzip-whole"):
        assert json.loads(whole_from(server.url_as(name)))["usage"]["completion_tokens"] == 3
    for name in ("comments", "error-first", "html-200", "503", "never-answers"):
        with pytest.raises(UpstreamFailed):
            whole_from(server.url_as(name), total_timeout_s=0.3)
    for name in ("400", "vllm-error"):
        with pytest.raises(UpstreamRefused):
            whole_from(server.url_as(name))
    server.behaves(says(head(200, (("content-type", "application/json"),)), b"{", Forever(b" " * (1 << 20))))
    with pytest.raises(UpstreamFailed, match="sent more than 16777216 bytes"):
        whole_from(server.url)


def whole_from(url: str, **options: Any) -> bytes:
    async def run() -> bytes:
        using = upstream(url, **options)
        try:
            async with using.open("/chat/completions", b'{"model":"theirs"}', stream=False) as reply:
                return reply.content
        finally:
            await using.close()

    return asyncio.run(run())


def test_a_client_that_leaves_closes_the_connection_at_once(server: Server) -> None:
    async def run(name: str, *, after_first: bool) -> float:
        using = upstream(server.url_as(name), **PATIENT)
        client = Client()
        task = asyncio.create_task(client.ask(using))
        await asyncio.to_thread(eventually, lambda: client.got if after_first else server.received)
        left_at = time.monotonic()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.received[0].left.wait, 10)
        await using.close()
        return time.monotonic() - left_at

    for name, after_first in (("hang", True), ("never-answers", False), ("endless-stream", True)):
        server.received.clear()
        assert asyncio.run(run(name, after_first=after_first)) < 1
        eventually(lambda: server.open_connections == 0)


def test_a_connection_is_used_again_after_a_complete_reply(server: Server) -> None:
    async def run(name: str, times: int) -> None:
        using = upstream(server.url_as(name))
        for _ in range(times):
            await Client().ask(using)
        await using.close()

    for name in ("normal", "no-done", "gzip", "comments"):
        before = server.connections
        asyncio.run(run(name, 5))
        assert server.connections == before + 1


def test_connections_are_not_used_again_after_a_reply_that_was_left(server: Server) -> None:
    async def run() -> None:
        using = upstream(server.url)
        for name in ("hang", "normal"):
            server.behaves(name)
            with suppress(UpstreamLost):
                await Client().ask(using)
        await using.close()

    before = server.connections
    asyncio.run(run())
    assert server.connections == before + 2


def test_a_kept_connection_that_the_upstream_gave_up_is_replaced(server: Server) -> None:
    async def run() -> list[str]:
        using, clients = upstream(server.url_as("closes-on-reuse")), [Client() for _ in range(3)]
        for client in clients:
            await client.ask(using)
        await using.close()
        return [client.text for client in clients]

    assert asyncio.run(run()) == ["".join(TEXTS)] * 3


def test_an_upstream_is_read_only_as_fast_as_its_client_reads(server: Server) -> None:
    async def run() -> tuple[int, int]:
        using = upstream(server.url_as("endless-stream"), **PATIENT)
        async with using.open("/completions", outgoing(BODY, using.config, stream=True), stream=True) as reply:
            (received,) = server.received
            held_up_at = [await asyncio.to_thread(stuck_at, received)]
            while received.sent_bytes == held_up_at[0]:
                await reply.read()
            held_up_at.append(await asyncio.to_thread(stuck_at, received))
        await using.close()
        return held_up_at[0], held_up_at[1]

    first, second = asyncio.run(run())
    assert first < second < 16 << 20  # in the buffers of two kernels, and ours


def stuck_at(received: Received) -> int:
    """How many bytes were sent when no more could be."""
    seen: list[int] = []

    def is_stuck() -> bool:
        seen.append(received.sent_bytes)
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    eventually(is_stuck)
    return seen[-1]


def test_closing_lets_replies_end_and_leaves_no_connection(server: Server) -> None:
    server.behaves(Stream(wait_before=(2,)))

    async def run() -> str:
        using, client = upstream(server.url, **PATIENT), Client()
        task = asyncio.create_task(client.ask(using))
        await asyncio.to_thread(eventually, lambda: client.got)
        await using.close()
        server.release()
        await task
        return client.text

    assert asyncio.run(run()) == "".join(TEXTS)
    eventually(lambda: server.open_connections == 0)


def test_comments_that_are_unpacked_without_end_do_not_block_the_others(server: Server) -> None:
    server.behaves(Stream(until=1, then=(Forever(b":" + b"a" * (1 << 20) + b"\n"),), encoding="gzip"))

    async def run() -> int:
        using, beats = upstream(server.url, idle_timeout_s=0.5), 0
        task = asyncio.create_task(Client().ask(using))
        while not task.done():
            await asyncio.sleep(0.01)
            beats += 1
        await using.close()
        with pytest.raises(UpstreamLost, match="silent for too long"):
            task.result()
        return beats

    assert asyncio.run(run()) > 10


def test_no_thread_is_left(server: Server) -> None:
    before = threading.active_count()
    Client().ask_once(server.url)
    assert threading.active_count() <= before


def test_the_end_of_a_reply_may_be_slow_in_coming(server: Server) -> None:
    """The client has its `[DONE]` by then. The connection is given up."""
    event = Stream().event('{"choices":[{"index":0,"text":" a","finish_reason":"stop"}]}')
    headers = (("content-type", "text/event-stream"),)
    server.behaves(says(head(200, headers), event, b"data: [DONE]\n\n", Forever(b"", 0.1)))
    client = Client()
    client.ask_once(server.url)
    assert client.text == " a"
    server.behaves(says(head(200, headers), event, b"data: [DONE]", Close()))
    client = Client()
    client.ask_once(server.url)
    assert client.got.endswith(b"data: [DONE]\n\n")
