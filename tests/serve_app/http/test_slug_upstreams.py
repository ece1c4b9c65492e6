"""Marketplace slugs with remote endpoints: real servers that behave and misbehave, over real connections."""

import json
from decimal import Decimal
from typing import Any

import pytest

from serve_app.api.record import Outcome
from tests.support.harness import KEY, OTHER_KEY, RunningEdge
from tests.support.marketplace.slugs import (
    SLUG,
    THEIR_KEY,
    Sell,
    ask,
    ask_chat,
    endpoint_of,
    last_record,
    listed,
    local,
    priced,
    remote,
    text_of,
    under_clock,
)
from tests.support.marketplace.upstream import Upstream
from tests.support.marketplace.upstream_replies import TEXTS, Behaviour, Stream, refusal, usage_of
from tests.support.processes.bad_ports import closed_port, silent_port
from tests.support.wire import error

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

COLORS = "".join(TEXTS)
FAIL_FIRST = [
    *("error-first", "empty", "done-only", "cut-at-once", "reset-at-once", "cut-after-head", "gzip-lies"),
    *("never-answers", "slow-head", "half-a-head", "slow-first-byte", "comments-first", "endless-headers"),
    *("long-header", "html-200", "html-404", "html-502", "429-retry-after", "503-retry-after", "echo-401", "echo-500"),
    *("301", "302", "303", "307", "308", "401", "402", "403", "404", "405", "408", "429", "500", "502", "503", "504"),
]
FAIL_LATER = [
    *("error-mid", "cut", "cut-no-length", "cut-in-event", "reset", "stall", "hang", "not-json"),
    *("comments-for-ever", "drip", "endless-event", "gzip-bomb", "echo-events"),
]
END_WELL = [
    *("normal", "usage-beside-last", "usage-with-text", "usage-every", "usage-every-but-own", "usage-never"),
    *("usage-unasked", "finish-with-text", "no-done", "comments", "crlf", "cr", "bom", "multi-line", "no-space"),
    *("fields", "bytewise", "unknown-fields", "no-length", "closes-after", "gzip", "deflate"),
]


# --- what goes up, and what comes back ---


def test_a_stream_of_a_remote_endpoint_comes_through(
    edge: RunningEdge, sell: Sell, upstream: Upstream, key_file: Any
) -> None:
    sell(remote("far", upstream.url, key=key_file))
    response = ask(edge, max_tokens=32, seed=12345678901234567890, logit_bias={"1": 0.10}, x_more=[1e400 * 0 == 0])
    assert (text_of(edge, response), endpoint_of(response)) == (COLORS, "far")
    assert {event["model"] for event in edge.events(response)[:-1]} == {SLUG}
    assert "x-ignored-fields" not in response.headers
    (received,) = upstream.received
    assert received.path == "/v1/completions"
    assert received.header("authorization") == f"Bearer {THEIR_KEY}"
    assert KEY not in str(received.headers) + received.body.decode()
    assert received.json() == {
        "model": "their/model",
        "prompt": "hi",
        "stream": True,
        "max_tokens": 32,
        "seed": 12345678901234567890,
        "logit_bias": {"1": 0.10},
        "x_more": [False],
        "stream_options": {"include_usage": True},
    }


def test_a_chat_of_a_remote_endpoint_comes_through(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url))
    response = ask_chat(edge, f"{SLUG}/ep/far", messages=[{"role": "critic", "content": {"odd": 1}}])
    assert (text_of(edge, response), endpoint_of(response)) == (COLORS, "far")
    assert {event["model"] for event in edge.events(response)[:-1]} == {f"{SLUG}/ep/far"}
    (received,) = upstream.received
    assert received.path == "/v1/chat/completions"
    assert received.header("authorization") is None
    assert received.json()["messages"] == [{"role": "critic", "content": {"odd": 1}}]


@pytest.mark.parametrize("takes_it", [True, False])
def test_the_cache_key_goes_up_only_where_it_is_taken_and_the_price_nowhere(
    edge: RunningEdge, sell: Sell, upstream: Upstream, takes_it: bool
) -> None:
    sell(remote("far", upstream.url, takes={"prompt_cache_key": takes_it}))
    assert ask(edge, prompt_cache_key="tenant-7", price={"max_prompt": 5}).status_code == 200
    sent = upstream.received[0].json()
    assert sent.get("prompt_cache_key") == ("tenant-7" if takes_it else None)
    assert "price" not in sent


@pytest.mark.parametrize("behaviour", END_WELL)
@pytest.mark.parametrize("wants_usage", [True, False])
def test_every_good_stream_says_the_same(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str, wants_usage: bool
) -> None:
    sell(remote("far", upstream.url_as(behaviour)))
    fields = {"stream_options": {"include_usage": True}} if wants_usage else {}
    response = ask(edge, **fields)
    assert text_of(edge, response) == COLORS
    events = edge.events(response)[:-1]
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"]
    counted = [event["usage"] for event in events if event.get("usage")]
    if not wants_usage:
        assert counted == []
    else:
        assert events[-1]["choices"] == []
        assert counted == [events[-1]["usage"]]
        if behaviour != "usage-never":
            assert counted == [json.loads(usage_of(7, 2, 3))]
    record = last_record(edge)
    assert (record.outcome, record.finish_reason) == (Outcome.DONE, "stop")


def test_unknown_fields_come_back_as_they_are(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url_as("unknown-fields")))
    response = ask(edge)
    assert '"x_cost":0.10,"x_big":12345678901234567890123' in response.text
    assert '"x_seen":true' in response.text


def test_the_record_has_the_usage_the_price_and_the_upstreams_model(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    sell(remote("far", upstream.url, price=priced(2, 10, 1)))
    ask(edge)
    record = last_record(edge)
    assert (record.slug, record.endpoint, record.model, record.streamed) == (SLUG, "far", "their/model", True)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (7, 2, 3)
    assert (record.is_estimated, record.cost) == (False, Decimal("0.000042"))
    assert record.first_token_s is not None


def test_what_an_upstream_does_not_count_is_estimated(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url_as("usage-never"), takes={"stream_usage": False}))
    assert ask(edge, prompt="x" * 4000).status_code == 200
    assert "stream_options" not in upstream.received[0].json()
    record = last_record(edge)
    assert record.is_estimated
    assert record.completion_tokens == 3
    assert 1000 <= record.prompt_tokens <= 1050


def test_usage_that_cannot_be_is_cut_marked_and_logged(
    edge: RunningEdge, sell: Sell, upstream: Upstream, caplog: pytest.LogCaptureFixture
) -> None:
    sell(remote("far", upstream.url))
    upstream.behaves(Stream(prompt_tokens=10**9))
    response = ask(edge, stream_options={"include_usage": True})
    record = last_record(edge)
    assert (record.is_estimated, record.completion_tokens) == (True, 3)
    assert 1024 < record.prompt_tokens < 1024 + 500
    assert edge.events(response)[-2]["usage"]["prompt_tokens"] == record.prompt_tokens
    assert (
        f"request_id={record.request_id} slug={SLUG} endpoint=far reports more tokens than there can be" in caplog.text
    )


def test_a_large_event_comes_through(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url_as("large-event")))
    assert text_of(edge, ask(edge)) == "x" * 1_000_000 + " end"


def test_a_slug_that_allows_it_replies_whole_with_what_it_would_stream(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    sell(remote("far", upstream.url), allow_whole=True)
    for asked, said in ((ask, lambda choice: choice["text"]), (ask_chat, lambda choice: choice["message"]["content"])):
        response = asked(edge, stream=False)
        whole = response.json()
        assert (endpoint_of(response), whole["model"], upstream.received[-1].json()["stream"]) == ("far", SLUG, False)
        streamed = asked(edge, stream_options={"include_usage": True})
        assert text_of(edge, streamed) == said(whole["choices"][0])
        assert edge.events(streamed)[-2]["usage"] == whole["usage"]
    record = last_record(edge)
    assert (record.prompt_tokens, record.completion_tokens, record.is_estimated) == (7, 3, False)


# --- failures before the first byte ---


@pytest.mark.parametrize("behaviour", FAIL_FIRST)
def test_what_fails_before_its_first_byte_is_passed_over_and_cools_down(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    sell(remote("far", upstream.url_as(behaviour)), local("here"))
    edge.script.says("here")
    response = ask(edge, max_tokens=32)
    assert (endpoint_of(response), text_of(edge, response)) == ("here", "here")
    assert last_record(edge).passed_over == ("far",)
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
    assert endpoint_of(ask(edge)) == "here"
    assert len(upstream.received) == 1


@pytest.mark.parametrize("behaviour", ["slow-first-byte", "hang"])
def test_a_key_whose_requests_are_too_slow_takes_the_endpoint_from_no_other(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    (key, other) = edge.config["keys"]
    sell(remote("far", upstream.url), local("here"), changes={"keys": [key, {**other, "models": None}]})
    upstream.behaves_next(behaviour)
    for _ in range(3):
        ask(edge)
        assert [listed(edge, secret=secret)[0]["health"] for secret in (KEY, OTHER_KEY)] == ["cooling", "up"]
    assert (endpoint_of(ask(edge)), endpoint_of(ask(edge, key=OTHER_KEY))) == ("here", "far")
    assert len(upstream.received) == 2


@pytest.mark.parametrize("port", [closed_port, silent_port])
def test_an_upstream_that_cannot_be_connected_to_is_passed_over(edge: RunningEdge, sell: Sell, port: Any) -> None:
    with port() as number:
        sell(remote("far", f"http://127.0.0.1:{number}/v1"), local("here"))
        assert endpoint_of(ask(edge)) == "here"
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]


def test_a_private_address_is_not_connected_to_unless_it_is_allowed(
    edge: RunningEdge, sell: Sell, upstream: Upstream
) -> None:
    by_name = upstream.url.replace("127.0.0.1", "localhost")
    sell(remote("far", by_name, allow_private=False), local("here"))
    assert endpoint_of(ask(edge)) == "here"
    assert upstream.connections == 0


@pytest.mark.parametrize("behaviour", ["html-200", "error-first", "429", "echo-500"])
def test_a_whole_reply_that_fails_is_passed_over_too(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    sell(remote("far", upstream.url_as(behaviour)), local("here"), allow_whole=True)
    response = ask(edge, stream=False)
    assert (endpoint_of(response), response.json()["model"]) == ("here", SLUG)


def test_what_an_upstream_asks_for_lengthens_its_cool_down(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    upstream.behaves(refusal(429, headers=(("retry-after", "100"),)))
    sell(remote("far", upstream.url), local("here"))
    clock = under_clock(edge)
    ask(edge)
    clock.now += 99
    assert listed(edge)[0]["health"] == "cooling"
    clock.now += 1
    assert listed(edge)[0]["health"] == "probing"


def test_when_all_fail_the_caller_is_told_nothing_of_why(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("a", upstream.url_as("echo-401")), remote("b", upstream.url_as("html-502")))
    response = ask(edge)
    assert response.status_code == 503
    message = f"No endpoint of {SLUG!r} answered now: 'a' and 'b' failed."
    assert response.json() == error(message, "server_error", code="no_endpoint_available")
    record = last_record(edge)
    assert (record.prompt_tokens, record.is_estimated, record.endpoint) == (0, False, "")


# --- refusals of the request ---


@pytest.mark.parametrize("status", ["400", "413", "415", "422"])
def test_a_refusal_of_the_request_passes_through_and_is_no_failure(
    edge: RunningEdge, sell: Sell, upstream: Upstream, status: str
) -> None:
    sell(remote("far", upstream.url_as(status)), local("here"))
    response = ask(edge)
    assert response.status_code == int(status)
    assert response.json() == error(f"The upstream says {status}.")
    assert response.headers["x-endpoint"] == "far"
    assert (edge.script.requests, last_record(edge).outcome) == ([], Outcome.REFUSED)
    assert [item["health"] for item in listed(edge)] == ["up", "up"]


@pytest.mark.parametrize("behaviour", ["detail", "vllm-error", "text-error", "empty-error", "not-utf8-error"])
def test_a_refusal_in_another_shape_gets_ours(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    sell(remote("far", upstream.url_as(behaviour)))
    response = ask(edge)
    assert response.status_code in (400, 422)
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["type"] == ("BadRequestError" if behaviour == "vllm-error" else "invalid_request_error")
    assert body["error"]["message"]


def test_a_huge_refusal_is_cut(edge: RunningEdge, sell: Sell, upstream: Upstream) -> None:
    sell(remote("far", upstream.url_as("large-error")))
    response = ask(edge)
    assert response.status_code == 400
    assert len(response.content) < 100_000


# --- failures after the first byte ---


@pytest.mark.parametrize("behaviour", FAIL_LATER)
def test_what_fails_after_its_first_byte_ends_with_an_error_event(
    edge: RunningEdge, sell: Sell, upstream: Upstream, behaviour: str
) -> None:
    sell(remote("far", upstream.url_as(behaviour)), local("here"))
    response = ask(edge)
    assert endpoint_of(response) == "far"
    *before, last = edge.events(response)
    assert before
    assert last["error"]["code"] == "upstream_failed"
    assert edge.script.requests == []
    record = last_record(edge)
    assert (record.outcome, record.error_code, record.endpoint) == (Outcome.FAILED, "upstream_failed", "far")
    assert record.completion_tokens >= 1
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
    assert upstream.received[-1].over.wait(1.0)


@pytest.mark.parametrize("behaviour", ["echo-400", "echo-401", "echo-500", "echo-events"])
def test_the_upstreams_key_reaches_neither_the_client_nor_the_log(
    edge: RunningEdge,
    sell: Sell,
    upstream: Upstream,
    key_file: Any,
    caplog: pytest.LogCaptureFixture,
    behaviour: str,
) -> None:
    sell(remote("far", upstream.url_as(behaviour), key=key_file))
    with caplog.at_level("DEBUG"):
        response = ask(edge)
        edge.wait_until_idle()
    assert upstream.received[0].header("authorization") == f"Bearer {THEIR_KEY}"
    shown = response.text + str(response.headers) + caplog.text
    assert THEIR_KEY not in shown
    assert KEY not in caplog.text
    assert "set-cookie" not in response.headers
    assert "x-echo" not in response.headers


FORGED = {"choices": [{"index": 0, "text": "", "finish_reason": "a\nrequest_id=0" + 5000 * "!"}]}


@pytest.mark.parametrize(
    "behaviour",
    [
        refusal(400, json.dumps({"error": {"message": "no", "code": "a\nrequest_id=0"}}).encode()),
        Stream(until=1, then=(Stream().event(json.dumps(FORGED)), b"data: [DONE]\n\n")),
    ],
)
def test_an_upstream_cannot_write_a_line_of_the_log(
    edge: RunningEdge, sell: Sell, upstream: Upstream, caplog: pytest.LogCaptureFixture, behaviour: Behaviour
) -> None:
    sell(remote("far", upstream.url))
    upstream.behaves(behaviour)
    with caplog.at_level("INFO"):
        ask(edge)
        edge.wait_until_idle()
    (line,) = (one.getMessage() for one in caplog.records if "asked=" in one.getMessage())
    assert "%0Arequest_id%3D0" in line
    assert len(line) < 2000
    assert "\n" not in line
