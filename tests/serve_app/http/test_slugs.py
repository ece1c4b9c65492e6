"""Marketplace slugs whose endpoints are served here: what is asked for, which endpoint answers, and who may ask."""

import hashlib
import json
from decimal import Decimal
from typing import Any

import pytest

from engines.interface.errors import EngineStopped, NonFiniteLogits, QueueFull
from engines.interface.protocol import GenerateRequest
from serve_app.api.record import Outcome
from tests.support.harness import BASE, CHAT, KEY, PLAIN, RunningEdge, StoredCheckpoint
from tests.support.marketplace.slugs import (
    SLUG,
    Sell,
    ask,
    ask_chat,
    endpoint_of,
    last_record,
    listed,
    local,
    priced,
    slug,
    text_of,
    under_clock,
)
from tests.support.waiting import eventually
from tests.support.wire import error, post_head, refused

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

GONE = "tinker://no/sampler_weights/where"
STORED = "tinker://r/sampler_weights/n"
ONLY_SLUGS = "rh-key-for-slugs-only"
COLORS = " red, yellow and blue."


def key(secret: str, *models: str) -> dict[str, Any]:
    return {"name": secret, "sha256": hashlib.sha256(secret.encode()).hexdigest(), "models": models}


def no_endpoint(message: str) -> object:
    return error(message, "server_error", code="no_endpoint_available")


# --- a stream ---


@pytest.mark.parametrize("model", [SLUG, f"{SLUG}/ep/here"])
def test_a_slug_streams_from_its_endpoint_under_the_name_that_was_asked_for(
    edge: RunningEdge, sell: Sell, model: str
) -> None:
    sell(local("here"))
    edge.script.says(COLORS)
    response = ask(edge, model, max_tokens=32)
    assert (text_of(edge, response), endpoint_of(response)) == (COLORS, "here")
    assert {event["model"] for event in edge.events(response)[:-1]} == {model}
    assert "x-ignored-fields" not in response.headers


def test_a_chat_streams_too(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here", CHAT))
    edge.script.says("yes")
    response = ask_chat(edge)
    assert (text_of(edge, response), endpoint_of(response)) == ("yes", "here")


def test_an_endpoint_may_be_a_variant_or_a_checkpoint_and_the_key_may_use_it_only_here(
    edge: RunningEdge, sell: Sell
) -> None:
    edge.checkpoints.held[STORED] = StoredCheckpoint("digest", owner="acme")
    sell(
        slug(local("it", f"{CHAT}:peft:128"), id="acme/variant"),
        slug(local("it", STORED, owner="acme"), id="acme/adapted"),
        slug(local("it", f"{CHAT}:peft:128;{STORED}", owner="acme"), id="acme/both"),
        changes={"keys": [key(ONLY_SLUGS, "acme/variant", "acme/adapted", "acme/both")]},
    )
    for name in ("acme/variant", "acme/adapted", "acme/both"):
        assert endpoint_of(ask(edge, name, key=ONLY_SLUGS)) == "it"
    adapters = [request.adapter and request.adapter.digest for request in edge.script.requests]
    assert adapters == [None, "digest", "digest"]
    for name in (CHAT, STORED, f"{CHAT};{STORED}"):
        assert ask(edge, name, key=ONLY_SLUGS).status_code == 404


def test_a_private_checkpoint_is_not_lent_without_its_owner(edge: RunningEdge, sell: Sell) -> None:
    edge.checkpoints.held[STORED] = StoredCheckpoint("digest", owner="acme")
    sell(local("it", STORED))
    response = ask(edge)
    assert response.status_code == 503
    assert STORED not in response.text


def test_usage_comes_in_the_last_chunk_if_it_is_asked_for(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"))
    edge.script.says("abc")
    *_, usage, done = edge.events(ask(edge, max_tokens=9, stream_options={"include_usage": True}))
    assert (done, usage["choices"], usage["usage"]["completion_tokens"]) == ("[DONE]", [], 4)
    assert all("usage" not in event for event in edge.events(ask(edge))[:-1])


def test_ignored_fields_are_named_but_not_the_price(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"))
    response = ask(edge, price={"max_prompt": 1}, suffix="x")
    assert response.headers["x-ignored-fields"] == "suffix"


def test_what_a_request_cost_and_where_it_went_is_recorded(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here", price=priced(2, 10)))
    edge.script.says("abc")
    ask(edge, max_tokens=9)
    edge.wait_until_idle()
    record = edge.recorder.ended[-1]
    assert (record.slug, record.endpoint, record.model, record.passed_over) == (SLUG, "here", BASE, ())
    assert (record.prompt_tokens, record.completion_tokens, record.is_estimated) == (2, 4, False)
    assert record.cost == Decimal("0.000044")


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"stream": False}, f"stream must be true for the marketplace slug {SLUG!r}, got false.", "stream"),
        ({"stream": None}, f"stream must be true for the marketplace slug {SLUG!r}, got null.", "stream"),
        ({"prompt": ["hi"]}, "prompt must be a string, got a list of 1.", "prompt"),
        ({"prompt": [1, 2]}, "prompt must be a string, got a list of 2.", "prompt"),
        ({"prompt": ""}, "prompt must not be empty, got a string of 0 characters.", "prompt"),
        ({"prompt": None}, "prompt must be a string, got null.", "prompt"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0.", "max_tokens"),
        ({"max_tokens": True}, "max_tokens must be an integer, got true.", "max_tokens"),
        ({"temperature": 2.5}, "temperature must be at most 2, got 2.5.", "temperature"),
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1.", "temperature"),
        ({"temperature": "hot"}, 'temperature must be a number, got "hot".', "temperature"),
        ({"price": 1}, "price must be an object, got 1.", "price"),
        ({"price": {"max_prompt": -1}}, "price.max_prompt must be at least 0, got -1.", "price.max_prompt"),
        ({"price": {"max_prompt": "1"}}, 'price.max_prompt must be a number, got "1".', "price.max_prompt"),
        (
            {"price": {"max_completion": True}},
            "price.max_completion must be a number, got true.",
            "price.max_completion",
        ),
        ({"price": {"max_promt": 1}}, "price.max_promt is not a known key, got 1.", "price.max_promt"),
        (
            {"price": {"sort": "speed"}},
            "price.sort must be 'price', 'latency' or 'throughput', got \"speed\".",
            "price.sort",
        ),
    ],
)
def test_a_bad_request_is_refused_by_field_and_value(
    edge: RunningEdge, sell: Sell, fields: Any, message: str, param: str
) -> None:
    sell(local("here"))
    assert refused(ask(edge, **fields)) == (message, param)
    assert edge.script.requests == []


def test_unset_is_null_also_in_the_price(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"))
    unset = {"max_prompt": None, "max_completion": None, "sort": None}
    for price in (None, {}, unset):
        assert endpoint_of(ask(edge, price=price, temperature=None, prompt_cache_key=None)) == "here"


def test_what_only_the_endpoint_judges_is_refused_by_it_without_harm_to_its_health(
    edge: RunningEdge, sell: Sell
) -> None:
    sell(local("here"), local("there"))
    response = ask(edge, top_p=0)
    assert refused(response) == ("top_p must be greater than 0, got 0.", "top_p")
    assert response.headers["x-endpoint"] == "here"
    assert refused(ask_chat(edge)) == (
        f"The model {SLUG!r} has no chat template; use POST /completions with a prompt.",
        "model",
    )
    assert [item["health"] for item in listed(edge)] == ["up", "up"]
    assert edge.recorder.ended[-1].passed_over == ()


@pytest.mark.parametrize("model", [f"{SLUG}/ep/nowhere", f"{SLUG}/ep/", "acme/other", f"{SLUG}/ep/here/ep/here"])
def test_an_unknown_slug_or_endpoint_is_404(edge: RunningEdge, sell: Sell, model: str) -> None:
    sell(local("here"))
    response = ask(edge, model)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


# --- whole replies ---


def test_a_slug_that_allows_it_replies_whole_with_what_it_would_stream(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"), allow_whole=True)
    edge.script.says(COLORS)
    whole = ask(edge, stream=False, max_tokens=50)
    reply = whole.json()
    assert (reply["model"], endpoint_of(whole)) == (SLUG, "here")
    response = ask(edge, max_tokens=50, stream_options={"include_usage": True})
    assert text_of(edge, response) == reply["choices"][0]["text"] == COLORS
    assert edge.events(response)[-2]["usage"] == reply["usage"]
    assert endpoint_of(ask(edge, stream=None)) == "here"


def test_the_options_of_a_stream_need_one(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"), allow_whole=True)
    message = "stream_options needs stream to be true, got false."
    assert refused(ask(edge, stream=False, stream_options={})) == (message, "stream_options")


# --- the choice ---


def test_the_cheapest_comes_first_and_of_equals_the_first_that_is_configured(edge: RunningEdge, sell: Sell) -> None:
    sell(
        local("dear", price=priced(3, 3)),
        local("cheap", price=priced(1, 2)),
        local("as-cheap", price=priced(2, 1)),
    )
    assert endpoint_of(ask(edge)) == endpoint_of(ask(edge, price={"sort": "price"})) == "cheap"
    assert endpoint_of(ask(edge, f"{SLUG}/ep/dear")) == "dear"


def test_limits_of_the_price_leave_endpoints_out(edge: RunningEdge, sell: Sell) -> None:
    sell(local("prompt", price=priced(0.1, 2)), local("completion", price=priced(2, 0.3)))
    assert endpoint_of(ask(edge, price={"max_prompt": 0.1})) == "prompt"
    assert endpoint_of(ask(edge, price={"max_completion": 0.3})) == "completion"
    response = ask(edge, price={"max_prompt": 0.1, "max_completion": 0.3})
    assert response.status_code == 503
    assert response.json() == no_endpoint(f"No endpoint of {SLUG!r} can be used: 2 of 2 cost more than price allows.")
    assert int(response.headers["retry-after"]) >= 1
    assert "x-endpoint" not in response.headers


def test_a_pinned_endpoint_over_the_price_is_503(edge: RunningEdge, sell: Sell) -> None:
    sell(local("dear", price=priced(9, 9)), local("cheap"))
    response = ask(edge, f"{SLUG}/ep/dear", price={"max_prompt": 1})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_endpoint_available")


def test_the_same_cache_key_goes_to_the_same_endpoint_and_losing_one_moves_only_its_keys(
    edge: RunningEdge, sell: Sell
) -> None:
    names = ("a", "b", "c")
    keys = [f"tenant-{number}" for number in range(30)]
    sell(*(local(name, price=priced(cost, cost)) for cost, name in enumerate(names)))

    def homes() -> dict[str, str | None]:
        return {cache_key: endpoint_of(ask(edge, prompt_cache_key=cache_key, max_tokens=1)) for cache_key in keys}

    before = homes()
    assert set(before.values()) == set(names)
    assert homes() == before
    sell(local("a", price=priced(0, 0)), local("b", GONE), local("c", price=priced(2, 2)))
    after = homes()
    assert {cache_key for cache_key in keys if after[cache_key] != before[cache_key]} == {
        cache_key for cache_key in keys if before[cache_key] == "b"
    }


def test_the_cache_key_is_a_hint_for_the_replica_as_well(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"))
    assert ask(edge, prompt_cache_key="x" * 1024).status_code == 200
    assert refused(ask(edge, prompt_cache_key="x" * 1025))[1] == "prompt_cache_key"


# --- fallback ---


@pytest.mark.parametrize("failure", [EngineStopped("stops"), NonFiniteLogits("nan")])
def test_an_endpoint_that_fails_before_its_first_token_is_passed_over_and_cools_down(
    edge: RunningEdge, sell: Sell, failure: Any
) -> None:
    sell(local("first"), local("second", PLAIN))
    replies: dict[str, Any] = {}

    def reply(request: GenerateRequest) -> Any:
        replies[request.request_id] = None
        return [failure] if len(replies) <= (2 if isinstance(failure, EngineStopped) else 1) else None

    edge.script.reply = reply
    response = ask(edge)
    assert endpoint_of(response) == "second"
    edge.wait_until_idle()
    assert edge.recorder.ended[-1].passed_over == ("first",)
    assert edge.recorder.ended[-1].model == PLAIN
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
    assert endpoint_of(ask(edge)) == "second"


def test_a_full_queue_sends_a_request_on_but_takes_the_endpoint_from_nobody(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first"), local("second"))
    waiting = iter([[QueueFull(1)]])
    edge.script.reply = lambda request: next(waiting, None)
    assert endpoint_of(ask(edge)) == "second"
    assert [item["health"] for item in listed(edge)] == ["up", "up"]
    assert endpoint_of(ask(edge)) == "first"


def test_if_all_fail_it_is_503_and_nothing_is_charged(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first", GONE), local("second"))
    edge.script.reply = lambda request: [NonFiniteLogits("nan")]
    response = ask(edge)
    assert response.status_code == 503
    assert response.json() == no_endpoint(f"No endpoint of {SLUG!r} answered now: 'first' and 'second' failed.")
    assert "x-endpoint" not in response.headers
    edge.wait_until_idle()
    record = edge.recorder.ended[-1]
    assert (record.prompt_tokens, record.cost, record.outcome) == (0, 0, Outcome.FAILED)
    assert (record.slug, record.endpoint, record.passed_over) == (SLUG, "", ("first", "second"))


def test_a_pinned_endpoint_has_no_fallback(edge: RunningEdge, sell: Sell) -> None:
    sell(local("gone", GONE), local("here"))
    first, second = ask(edge, f"{SLUG}/ep/gone"), ask(edge, f"{SLUG}/ep/gone")
    assert [first.status_code, second.status_code] == [503, 503]
    assert second.json() == no_endpoint(f"The endpoint 'gone' of {SLUG!r} is not available now.")
    assert edge.script.requests == []


def test_after_its_cool_down_one_request_probes_an_endpoint(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first", STORED), local("second", PLAIN))
    clock = under_clock(edge)
    for cool_down_s in (30, 60):
        assert endpoint_of(ask(edge)) == "second"
        clock.now += cool_down_s - 1
        assert endpoint_of(ask(edge)) == "second"
        assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
        clock.now += 1
        assert [item["health"] for item in listed(edge)] == ["probing", "up"]
    edge.checkpoints.held[STORED] = StoredCheckpoint("digest")
    assert [endpoint_of(ask(edge)) for _ in range(2)] == ["first", "first"]
    assert [item["health"] for item in listed(edge)] == ["up", "up"]


def test_after_the_first_byte_there_is_no_fallback_but_an_error_event(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first"), local("second"))
    edge.script.says("abc", NonFiniteLogits("nan"))
    response = ask(edge, max_tokens=50)
    *_, last = edge.events(response)
    assert (response.headers["x-endpoint"], last["error"]["code"]) == ("first", "non_finite_logits")
    assert len(edge.script.requests) == 1
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]


def test_a_whole_reply_is_tried_elsewhere_as_long_as_none_of_it_was_sent(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first"), local("second"), allow_whole=True)
    waiting = iter([[*edge.script.encode("abc"), NonFiniteLogits("nan")]])
    edge.script.reply = lambda request: next(waiting, [*edge.script.encode("def"), edge.script.end])
    response = ask(edge, stream=False, max_tokens=50)
    assert (endpoint_of(response), response.json()["choices"][0]["text"]) == ("second", "def")
    edge.wait_until_idle()
    record = edge.recorder.ended[-1]
    assert (record.passed_over, record.completion_tokens) == (("first",), len(edge.script.encode("def")) + 1)


def test_a_client_that_leaves_a_whole_reply_pays_for_what_was_computed(edge: RunningEdge, sell: Sell) -> None:
    sell(local("first", price=priced(1, 10)), allow_whole=True)
    edge.script.says_and_hangs("abc", edge.engine)
    generated = edge.engine.stats().counters.generated_tokens
    body = json.dumps({"model": SLUG, "prompt": "hi", "max_tokens": 50}).encode()
    head = post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
    with edge.raw() as connection:
        connection.sendall(head + body)
        eventually(lambda: edge.engine.stats().counters.generated_tokens == generated + len(edge.script.encode("abc")))
    record = last_record(edge)
    assert (record.outcome, record.prompt_tokens) == (Outcome.LEFT, 2)
    assert record.completion_tokens >= 1


# --- listings, and who may use what ---


def test_the_endpoints_are_listed_with_prices_and_health_and_nothing_else(edge: RunningEdge, sell: Sell) -> None:
    sell(local("a", price=priced(0.1, 12.5, 0.02)), local("b", price=priced(1, 1000000)))
    answered = ask(edge, f"{SLUG}/ep/a", max_tokens=40)
    assert endpoint_of(answered) == "a"
    edge.wait_until_idle()
    first, second = listed(edge)
    assert first.pop("first_token_s") > 0
    assert first.pop("tokens_per_s") > 0
    about = {"object": "endpoint", "local": True, "health": "up"}
    assert first == {"name": "a", "price": {"prompt": "0.1", "cached": "0.02", "completion": "12.5"}, **about}
    price = {"prompt": "1", "cached": "1", "completion": "1000000"}
    assert second == {"name": "b", "price": price, "first_token_s": None, "tokens_per_s": None, **about}
    assert listed(edge, f"{SLUG}/ep/b") == [second]


def test_models_list_the_slugs_that_a_key_may_use(edge: RunningEdge, sell: Sell) -> None:
    sell(
        slug(local("a"), id="acme/one", owned_by="acme"),
        slug(local("a"), id="acme/two"),
        changes={"keys": [*edge.config["keys"], key(ONLY_SLUGS, "acme/two")]},
    )

    def names(secret: str) -> list[str]:
        with edge.http(secret) as client:
            return [item["id"] for item in client.get("/models").json()["data"]]

    assert names(KEY) == [CHAT, f"{CHAT}:peft:128", PLAIN, BASE, "acme/one", "acme/two"]
    assert names(ONLY_SLUGS) == ["acme/two"]
    with edge.http() as client:
        one = client.get("/models/acme%2Fone").json()
        pinned = client.get("/models/acme/one/ep/a").json()
    assert one == {"id": "acme/one", "object": "model", "created": 0, "owned_by": "acme"}
    assert pinned == {**one, "id": "acme/one/ep/a"}


@pytest.mark.parametrize("name", ["acme/one", "acme/one/ep/a", "acme/one/ep/unknown"])
def test_a_slug_that_a_key_may_not_use_is_like_one_that_is_not_there(edge: RunningEdge, sell: Sell, name: str) -> None:
    sell(
        slug(local("a"), id="acme/one"),
        slug(local("a"), id="acme/two"),
        changes={"keys": [key(ONLY_SLUGS, "acme/two")]},
    )
    with edge.http(ONLY_SLUGS) as client:
        answers = [ask(edge, asked, key=ONLY_SLUGS) for asked in (name, "acme/no-such")]
        answers += [client.get(f"/models/{asked}") for asked in (name, "acme/no-such")]
        answers += [client.get(f"/models/{asked}/endpoints") for asked in (name, "acme/no-such")]
    assert [answer.status_code for answer in answers] == [404] * 6
    shown = [json.dumps(answer.json()).replace(name, "NAME").replace("acme/no-such", "NAME") for answer in answers]
    assert shown[0::2] == shown[1::2]


def test_models_that_are_no_slugs_are_served_beside_them(edge: RunningEdge, sell: Sell) -> None:
    sell(local("here"))
    assert ask(edge, BASE).headers.get("x-endpoint") is None
    assert edge.complete(max_tokens=1).status_code == 200
    with edge.http() as client:
        assert client.get("../readyz").status_code == 200


def test_a_local_endpoint_whose_model_is_not_ready_is_passed_by(edge: RunningEdge, sell: Sell) -> None:
    elsewhere = {**edge.config["models"][2], "id": "far/Away", "app": "not-running"}
    sell(
        local("away", "far/Away", price=priced(0, 0)),
        local("here"),
        changes={"models": [*edge.config["models"], elsewhere]},
    )
    assert endpoint_of(ask(edge)) == "here"
    assert [item["health"] for item in listed(edge)] == ["not_ready", "up"]
    assert ask(edge, f"{SLUG}/ep/away").status_code == 503
