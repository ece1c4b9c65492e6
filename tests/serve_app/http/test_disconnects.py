"""A client that leaves stops its generation at once, in both modes, and nothing of it is left."""

import asyncio
import json
import random
from typing import Any

import pytest

from serve_app.api.record import Outcome
from tests.support.harness import BASE, CHAT, RunningEdge
from tests.support.waiting import eventually
from tests.support.wire import post_head

pytest_plugins = ("tests.support.edge_fixtures",)


def request(path: str = "/v1/completions", **fields: Any) -> bytes:
    body = json.dumps({"model": BASE, "prompt": "x", **fields}).encode()
    return post_head(path, "content-type: application/json", f"content-length: {len(body)}") + body


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}])
def test_leaving_stops_the_generation(edge: RunningEdge, fields: Any) -> None:
    edge.script.says_and_hangs("a", edge.engine)
    aborted = edge.engine.stats().counters.aborted
    with edge.raw() as connection:
        connection.sendall(request(**fields))
        eventually(lambda: edge.engine.stats().running == 1)
    edge.wait_until_idle()
    assert edge.engine.stats().counters.aborted == aborted + 1
    assert edge.recorder.ended[-1].outcome is Outcome.LEFT


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_stops_the_generation(edge: RunningEdge, stream: bool) -> None:
    edge.run(paused(edge))
    with edge.raw() as connection:
        connection.sendall(request(stream=stream))
        edge.run(waiting(edge))
    edge.wait_until_idle()
    assert edge.engine.stats().waiting == 0


async def paused(edge: RunningEdge) -> None:
    edge.engine.pause()


async def waiting(edge: RunningEdge) -> None:
    async with asyncio.timeout(10):
        while edge.engine.stats().waiting != 1:  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.002)


def test_closing_half_of_the_connection_counts_as_leaving(edge: RunningEdge) -> None:
    edge.script.says_and_hangs("a", edge.engine)
    with edge.raw() as connection:
        connection.sendall(request(stream=True))
        eventually(lambda: edge.engine.stats().running == 1)
        connection.shutdown(1)
        edge.wait_until_idle()


def test_a_client_that_resets_the_connection_leaves_nothing(edge: RunningEdge) -> None:
    edge.script.says_and_hangs("a", edge.engine)
    connection = edge.raw()
    connection.setsockopt(1, 13, b"\x01\0\0\0\0\0\0\0")  # SO_LINGER with no time: close sends a reset
    connection.sendall(request(stream=True))
    eventually(lambda: edge.engine.stats().running == 1)
    connection.close()
    edge.wait_until_idle()


def test_clients_that_leave_anywhere_leave_nothing_behind(edge: RunningEdge) -> None:
    rng = random.Random(7)
    whole = [request(stream=stream, max_tokens=300) for stream in (True, False)]
    chat = request("/v1/chat/completions", model=CHAT, messages=[{"role": "user", "content": "x"}], stream=True)
    for _ in range(60):
        sent = rng.choice([*whole, chat])
        with edge.raw() as connection:
            connection.sendall(sent[: rng.choice([len(sent), rng.randrange(len(sent))])])
            connection.settimeout(0.02)
            try:
                for _ in range(rng.randrange(4)):
                    connection.recv(rng.choice([1, 100, 4096]))
            except TimeoutError:
                pass
    # Answered after all of them were accepted and read: until then there is nothing to be seen of the last ones.
    assert edge.complete(max_tokens=3).status_code == 200
    edge.wait_until_idle()
    stats = edge.engine.stats()
    assert (stats.blocks_free, stats.adapter_slots_pinned) == (stats.blocks_total, 0)


def test_a_client_that_does_not_read_holds_up_nobody_and_is_let_go(edge: RunningEdge) -> None:
    with edge.raw() as connection:
        connection.setsockopt(1, 8, 4096)  # a small receive buffer
        connection.sendall(request(stream=True, logprobs=20))
        assert edge.complete(max_tokens=50).status_code == 200
    edge.wait_until_idle()


def test_a_request_pipelined_after_another_is_answered_after_it(edge: RunningEdge) -> None:
    edge.script.says("ok")
    with edge.raw() as connection:
        connection.sendall(request() + request())
        received = b""
        while received.count(b'"text":"ok"') < 2:
            received += connection.recv(65536)
    assert received.count(b"HTTP/1.1 200 OK") == 2
