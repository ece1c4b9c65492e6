"""Clients of slugs with remote endpoints: those that leave or read slowly, limits, configuration changes, the SDK."""

import json
import os
from pathlib import Path
from typing import Any

import openai
import pytest

from serve_app.api.record import Outcome
from tests.support.harness import RunningEdge
from tests.support.marketplace.slugs import (
    SLUG,
    THEIR_KEY,
    Sell,
    ask,
    endpoint_of,
    last_record,
    listed,
    local,
    remote,
    under_clock,
)
from tests.support.marketplace.upstream import Upstream, running_upstream
from tests.support.marketplace.upstream_replies import TEXTS, Stream
from tests.support.waiting import eventually
from tests.support.wire import post_head

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

COLORS = "".join(TEXTS)


# --- clients that leave or do not read ---


def request(**fields: Any) -> bytes:
    body = json.dumps({"model": SLUG, "prompt": "hi", "stream": True, **fields}).encode()
    return post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}") + body


@pytest.mark.parametrize(
    "behaviour", ["hang", "slow-first-byte", "never-answers", "endless-stream", "comments-for-ever"]
)
def test_a_client_that_leaves_is_felt_upstream_within_a_second(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    upstream.behaves(behaviour)
    sell(remote("far", upstream.url, first_byte_timeout_s=30.0, idle_timeout_s=30.0), local("here"))
    with edge.raw() as connection:
        connection.sendall(request())
        (received,) = upstream.wait_for(1)
        if behaviour not in ("slow-first-byte", "never-answers"):
            assert connection.recv(65536)
    assert received.left.wait(1.0)
    record = last_record(edge)
    assert (record.outcome, record.endpoint, record.is_estimated) == (Outcome.LEFT, "far", True)
    assert [item["health"] for item in listed(edge)] == ["up", "up"]
    eventually(lambda: upstream.open_connections == 0)


def test_a_whole_reply_that_nobody_waits_for_is_left_too(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    upstream.behaves("never-answers")
    sell(remote("far", upstream.url, first_byte_timeout_s=30.0), allow_whole=True)
    with edge.raw() as connection:
        connection.sendall(request(stream=False))
        (received,) = upstream.wait_for(1)
    assert received.left.wait(1.0)
    edge.wait_until_idle()


def test_a_client_that_does_not_read_holds_up_the_upstream(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    upstream.behaves("endless-stream")
    sell(remote("far", upstream.url, idle_timeout_s=30.0))
    with edge.raw() as connection:
        connection.sendall(request())
        (received,) = upstream.wait_for(1)
        sizes: list[int] = [-1]

        def stands_still() -> bool:
            sizes.append(received.sent_bytes)
            return len(sizes) > 20 and len(set(sizes[-20:])) == 1 and sizes[-1] > 0

        eventually(stands_still)
        assert received.sent_bytes < 8 << 20
        assert not received.left.is_set()
    assert received.left.wait(1.0)
    edge.wait_until_idle()


def test_comments_tell_a_client_that_an_upstream_is_silent(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    upstream.behaves("stall")
    sell(remote("far", upstream.url, idle_timeout_s=30.0))
    with edge.raw() as connection:
        connection.sendall(request())
        seen = b""
        while b": keep-alive\n\n" not in seen:
            seen += connection.recv(65536)
        upstream.release()
        while b"data: [DONE]" not in seen:
            seen += connection.recv(65536)


def test_the_time_limit_of_all_requests_holds_for_upstreams(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(
        remote("far", upstream.url_as("hang"), idle_timeout_s=30.0),
        changes={"limits": {"total_timeout_s": 0.5}},
    )
    *_, last = edge.events(ask(edge))
    assert last["error"]["code"] == "timeout"
    eventually(lambda: upstream.open_connections == 0)


# --- probes ---


def test_only_one_request_at_a_time_probes_and_one_that_leaves_makes_room(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    upstream.behaves_next("500")
    sell(remote("far", upstream.url, first_byte_timeout_s=30.0), local("here"))
    clock = under_clock(edge)
    assert endpoint_of(ask(edge)) == "here"
    clock.now += 30
    upstream.behaves("slow-first-byte")
    with edge.raw() as connection:
        connection.sendall(request())
        upstream.wait_for(2)
        assert endpoint_of(ask(edge)) == "here"
        assert ask(edge, f"{SLUG}/ep/far").status_code == 503
        assert listed(edge)[0]["health"] == "probing"
    assert upstream.received[1].left.wait(1.0)
    edge.wait_until_idle()
    upstream.behaves("normal")
    assert [endpoint_of(ask(edge)) for _ in range(2)] == ["far", "far"]
    assert listed(edge)[0]["health"] == "up"


def test_a_probe_that_fails_doubles_the_cool_down_up_to_five_minutes(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    upstream.behaves("500")
    sell(remote("far", upstream.url), local("here"))
    clock = under_clock(edge)
    for number, cool_down_s in enumerate((30, 60, 120, 240, 300, 300), start=1):
        assert endpoint_of(ask(edge)) == "here"
        assert len(upstream.received) == number
        clock.now += cool_down_s - 0.5
        assert endpoint_of(ask(edge)) == "here"
        assert len(upstream.received) == number
        clock.now += 0.5


# --- the choice by measurements ---


def test_the_fastest_is_preferred_once_all_are_measured(edge: RunningEdge, sell: Sell) -> None:
    slow = Stream(texts=(" a",) * 5, pace_s=0.05)
    with running_upstream(slow) as first, running_upstream(Stream(texts=(" a",) * 5, pace_s=0.001)) as second:
        sell(remote("slow", first.url), remote("fast", second.url))
        measured = [endpoint_of(ask(edge, price={"sort": "throughput"})) for _ in range(5)]
        assert measured == ["slow", "fast", "fast", "fast", "fast"]
        one, other = listed(edge)
        assert one["tokens_per_s"] < 25 < other["tokens_per_s"]
        assert {endpoint_of(ask(edge, price={"sort": "latency"})) for _ in range(3)} <= {"slow", "fast"}


def test_what_is_listed_of_a_remote_endpoint_says_nothing_of_where_it_is(
    edge: RunningEdge, sell: Sell, upstream: Upstream, key_file: Any
) -> None:
    sell(remote("far", upstream.url, key=key_file))
    ask(edge)
    edge.wait_until_idle()
    (shown,) = listed(edge)
    assert set(shown) == {"name", "object", "local", "price", "health", "first_token_s", "tokens_per_s"}
    assert (shown["local"], shown["health"]) == (False, "up")
    assert shown["first_token_s"] > 0
    with edge.http() as client:
        everything = json.dumps(shown) + client.get("/models").text + client.get(f"/models/{SLUG}").text
    for private in (str(upstream.port), "their/model", THEIR_KEY):
        assert private not in everything


# --- limits ---


def test_a_keys_limits_hold_for_remote_endpoints(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    upstream.behaves("slow-first-byte")
    limits = {"per_key": {"concurrency": 1, "tokens_per_minute": 1000}}
    sell(remote("far", upstream.url, first_byte_timeout_s=30.0), changes={"limits": limits})
    with edge.raw() as connection:
        connection.sendall(request(max_tokens=900))
        upstream.wait_for(1)
        response = ask(edge)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        upstream.release()
        seen = b""
        while b"data: [DONE]" not in seen:
            seen += connection.recv(65536)
    edge.wait_until_idle()
    upstream.behaves("normal")
    # Ten tokens were used of the 900 that were reserved, so the rest is there again.
    assert ask(edge, max_tokens=900).status_code == 200
    assert ask(edge, max_tokens=995).status_code == 429
    assert len(upstream.received) == 2


# --- configuration ---


def test_a_stream_outlives_the_configuration_that_it_began_with(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    upstream.behaves("stall")
    sell(remote("far", upstream.url, idle_timeout_s=30.0), remote("other", upstream.url_as("normal")))
    with edge.raw() as connection:
        connection.sendall(request())
        seen = b""
        while b"yellow" not in seen:
            seen += connection.recv(65536)
        sell(local("here"))
        assert endpoint_of(ask(edge)) == "here"
        upstream.release()
        while b"data: [DONE]" not in seen:
            seen += connection.recv(65536)
    edge.wait_until_idle()
    eventually(lambda: upstream.open_connections == 0)


def test_health_survives_a_change_of_something_else(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    far, here = remote("far", upstream.url_as("500")), local("here")
    sell(far, here)
    ask(edge)
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
    sell(far, here, local("more"), owned_by="acme")
    assert [item["health"] for item in listed(edge)] == ["cooling", "up", "up"]
    sell(remote("far", upstream.url), here)
    assert [item["health"] for item in listed(edge)] == ["up", "up"]


def test_a_key_that_cannot_be_read_refuses_its_slug_alone_and_shows_no_key(
    edge: RunningEdge, sell: Sell, upstream: Upstream, tmp_path: Path
) -> None:
    bad = remote("far", upstream.url, key={"file": str(tmp_path / "nothing")})
    slugs = [{"id": "acme/bad", "endpoints": [bad]}, {"id": SLUG, "endpoints": [local("here")]}]
    edge.reconfigure(marketplace={"slugs": slugs})
    try:
        assert endpoint_of(ask(edge)) == "here"
        assert ask(edge, "acme/bad").status_code == 404
        assert "acme/bad" in (edge.service.config_error or "")
        with edge.http(None) as client:
            assert client.get("../readyz").json()["config_errors"] == ["marketplace"]
    finally:
        edge.reconfigure()


def test_a_key_file_that_hangs_holds_up_nothing_for_long(edge: RunningEdge, upstream: Upstream, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    hanging = remote("far", upstream.url, key={"file": str(pipe)})
    edge.reconfigure(marketplace={"slugs": [{"id": SLUG, "endpoints": [hanging]}]})
    try:
        assert edge.service.config_error == "The key files of the marketplace were not read within 5 s."
        assert edge.complete(max_tokens=1).status_code == 200
    finally:
        with pipe.open("wb"):  # the thread that reads ends
            pass
        edge.reconfigure()


# --- clients ---


def test_the_openai_sdk_streams_from_a_slug(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url), allow_whole=True)
    with edge.sdk() as client:
        stream = client.completions.create(
            model=SLUG,
            prompt="The three primary colors are",
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"price": {"max_prompt": 2, "sort": "latency"}},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == COLORS
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        chat = client.chat.completions.create(model=SLUG, messages=[{"role": "user", "content": "hi"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices) == COLORS
        whole = client.completions.create(model=SLUG, prompt="x")
        assert (whole.choices[0].text, whole.model) == (COLORS, SLUG)
        names = [model.id for model in client.models.list()]
        assert SLUG in names
        assert client.models.retrieve(SLUG).owned_by == "roundhouse"


def test_the_openai_sdk_sees_an_error_in_the_middle(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url_as("cut")))
    with edge.sdk() as client, pytest.raises(openai.APIError, match="failed during the reply"):
        list(client.completions.create(model=SLUG, prompt="x", stream=True))
