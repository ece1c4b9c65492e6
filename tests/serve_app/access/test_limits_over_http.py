"""The limits that one caller meets, each with an answer of its own. Sizes of bodies: `http/test_body.py`; stops:
`api/test_refusals.py`; time limits: `http/test_streams.py`.
"""

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from engines.fake import FakeConfig
from engines.interface.errors import AdapterUnavailable, EngineStopped, QueueFull, RequestRefused
from serve_app.api.record import Outcome
from tests.support.harness import (
    BASE,
    CHAT,
    CONTEXT,
    KEY,
    OTHER_KEY,
    RunningEdge,
    StoredCheckpoint,
    config_for,
    running_edge,
)
from tests.support.waiting import eventually
from tests.support.wire import error, post_head

pytest_plugins = ("tests.support.edge_fixtures",)


@pytest.fixture
def limited(edge: RunningEdge) -> Iterator[Callable[..., None]]:
    """Gives the test's key these limits. What is used is kept by the key's name, so each test has one of its own."""
    name = uuid.uuid4().hex

    def limit(*others: dict[str, Any], service_limits: dict[str, Any] | None = None, **limits: int) -> None:
        keys = [{**edge.config["keys"][0], "name": name, "limits": limits}, *others]
        edge.reconfigure(keys=keys, limits=service_limits or {})

    yield limit
    edge.reconfigure()


def test_a_key_that_made_its_requests_of_the_minute_is_429_and_nothing_is_run(edge, limited):
    limited(requests_per_minute=2)
    answers = [edge.complete(max_tokens=1, stream=stream) for stream in (False, True)]
    assert [answer.status_code for answer in answers] == [200, 200]
    message = "This key may use 2 requests per minute; they are used up."
    for response in (edge.complete(stream=True), edge.chat()):
        assert response.status_code == 429
        assert response.json() == error(message, "rate_limit_error", code="rate_limit_exceeded")
        assert 1 <= int(response.headers["retry-after"]) <= 30
    assert len(edge.script.requests) == 2


def test_a_request_that_is_refused_for_its_body_counts_too(edge, limited):
    limited(requests_per_minute=2)
    assert [edge.complete(temperature=-1).status_code for _ in range(3)] == [400, 400, 429]


def test_a_key_at_its_limit_may_still_list_models(edge, limited):
    limited(requests_per_minute=1)
    assert [edge.complete(max_tokens=1).status_code for _ in range(2)] == [200, 429]
    with edge.http() as client:
        assert client.get("/models").status_code == 200


CHECKPOINT = "tinker://r/sampler_weights/n"


@pytest.mark.parametrize("path", ["/models?checkpoints=1", f"/models/{CHECKPOINT}", f"/models/{CHAT};{CHECKPOINT}"])
def test_looking_for_checkpoints_counts_as_a_request(edge, limited, path):
    edge.checkpoints.held[CHECKPOINT] = StoredCheckpoint("1")
    limited(requests_per_minute=2)
    with edge.http() as client:
        answers = [client.get(path) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"]
    assert edge.complete(max_tokens=1).status_code == 429


def test_both_prefixes_and_endpoints_share_the_limit_of_a_key(edge, limited):
    limited(requests_per_minute=2)
    with edge.http() as client:
        url = edge.url.replace("/v1", "/services/tinker-prod/oai/api/v1/completions")
        assert client.post(url, json={"model": BASE, "prompt": "x", "max_tokens": 1}).status_code == 200
    assert edge.chat(max_tokens=1).status_code == 200
    assert edge.complete().status_code == 429


def test_prompt_and_completion_tokens_of_streams_count(edge, limited):
    limited(tokens_per_minute=100)
    assert edge.complete([5] * 60, max_tokens=60, stream=True).status_code == 200
    edge.wait_until_idle()
    response = edge.complete()
    message = "This key may use 100 tokens per minute; they are used up."
    assert response.status_code == 429
    assert response.json() == error(message, "rate_limit_error", code="rate_limit_exceeded")


def test_a_prompt_counts_once_it_is_sent_to_the_engine_even_if_its_caller_leaves_before_the_first_token(edge, limited):
    limited(tokens_per_minute=50)
    body = json.dumps({"model": BASE, "prompt": [5] * 60, "stream": True}).encode()
    head = post_head("/v1/completions", "content-type: application/json", f"content-length: {len(body)}")
    edge.run(paused(edge))
    with edge.raw() as connection:
        connection.sendall(head + body)
        eventually(lambda: edge.engine.stats().waiting == 1)
        message = "This key may use 50 tokens per minute; they are used up."
        assert edge.complete().json() == error(message, "rate_limit_error", code="rate_limit_exceeded")
    eventually(lambda: len(edge.recorder.ended) == 2)
    edge.run(resumed(edge))
    found = edge.recorder.ended[-1]
    assert (found.outcome, found.prompt_tokens, found.completion_tokens) == (Outcome.LEFT, 60, 0)


@pytest.mark.parametrize("refusal", [QueueFull(5), RequestRefused("prompt", "no"), AdapterUnavailable("x")])
def test_what_the_engine_did_not_run_costs_no_tokens(edge, limited, refusal):
    limited(tokens_per_minute=50)
    edge.script.reply = lambda request: [refusal]
    assert edge.complete([5] * 60).json()["error"]["code"] != "rate_limit_exceeded"
    edge.wait_until_idle()
    assert edge.recorder.ended[-1].prompt_tokens == 0
    edge.script.says("a")
    assert edge.complete().status_code == 200


def test_a_request_that_is_handed_to_another_replica_is_charged_once(edge, limited):
    limited(tokens_per_minute=100)
    replies: Any = iter([[EngineStopped("draining")], edge.script.encode("a")])
    edge.script.reply = lambda request: next(replies)
    assert edge.complete([5] * 60).status_code == 200
    edge.script.says("a")
    assert edge.complete().status_code == 200


def test_limits_change_without_a_restart_and_what_was_used_stays_used(edge, limited):
    limited(requests_per_minute=1)
    assert [edge.complete(max_tokens=1).status_code for _ in range(2)] == [200, 429]
    limited(requests_per_minute=1, concurrency=5)
    assert edge.complete(max_tokens=1).status_code == 429
    limited()
    assert edge.complete(max_tokens=1).status_code == 200


def test_a_key_of_another_name_has_limits_of_its_own(edge, limited):
    limited({"name": "second", "sha256": hashlib.sha256(b"rh-second").hexdigest()}, requests_per_minute=1)
    assert [edge.complete(max_tokens=1).status_code for _ in range(2)] == [200, 429]
    assert edge.complete(key="rh-second", max_tokens=1).status_code == 200


def test_a_full_queue_of_the_model_is_429_and_those_in_it_are_served(model_folders):
    engine = FakeConfig(vocab_size=512, context_length=CONTEXT, max_running=1, max_waiting=1)
    with running_edge(config_for(model_folders), engine) as edge:
        edge.script.says_and_hangs("ab", edge.engine)
        with ThreadPoolExecutor(2) as callers:
            running = callers.submit(edge.complete)
            eventually(lambda: edge.engine.stats().running == 1)
            edge.script.says("ab")
            waiting = callers.submit(edge.chat)
            eventually(lambda: edge.engine.stats().waiting == 1)
            refused = [edge.complete(stream=stream) for stream in (False, True)]
            edge.run(resumed(edge))
            answers = [running.result(30).status_code, waiting.result(30).status_code]
    for response in refused:
        assert (response.status_code, response.headers["retry-after"]) == (429, "2")
        assert response.json() == error("The model is overloaded; try again.", "rate_limit_error", code="overloaded")
    assert answers == [200, 200]


def test_a_key_that_fills_the_queue_does_not_keep_another_out(model_folders):
    engine = FakeConfig(vocab_size=512, context_length=CONTEXT, max_running=1, max_waiting=6)
    config = config_for(model_folders)
    config["keys"].append({"name": "crowd", "sha256": hashlib.sha256(b"rh-crowd").hexdigest()})
    with running_edge(config, engine) as edge, ThreadPoolExecutor(16) as callers:
        edge.script.says_and_hangs("ab", edge.engine)
        crowd = [callers.submit(edge.complete, key="rh-crowd")]
        eventually(lambda: edge.engine.stats().running == 1)
        edge.script.says("ab")
        for waiting in range(1, 7):
            crowd.append(callers.submit(edge.complete, key="rh-crowd"))
            eventually(lambda waiting=waiting: edge.engine.stats().waiting == waiting)
        others = [callers.submit(edge.complete) for _ in range(3)]
        eventually(lambda: sum(answer.done() for answer in crowd) == 3)
        assert edge.complete(key="rh-crowd").status_code == 429
        edge.run(resumed(edge))
        statuses = [[answer.result(30).status_code for answer in answers] for answers in (crowd, others)]
    assert statuses == [[200] * 4 + [429] * 3, [200] * 3]


def test_256_requests_at_once_get_no_more_tokens_than_the_minute_has(edge, limited):
    limited(tokens_per_minute=1000)
    edge.run(paused(edge))  # nothing ends, so nothing that was reserved comes back
    with ThreadPoolExecutor(64) as callers:
        answers = [callers.submit(edge.complete, [5] * 5, max_tokens=95) for _ in range(256)]
        eventually(lambda: sum(answer.done() for answer in answers) == 246)
        edge.run(resumed(edge))
        statuses = [answer.result(30).status_code for answer in answers]
    assert statuses.count(200) == 10
    assert statuses.count(429) == 246


def test_a_request_that_got_no_token_in_time_is_not_charged(edge, limited):
    limited(service_limits={"first_token_timeout_s": 0.05}, tokens_per_minute=100)
    edge.run(paused(edge))
    for _ in range(3):
        assert edge.complete([5] * 50, max_tokens=40).json()["error"]["code"] == "timeout"
    edge.run(resumed(edge))
    limited(tokens_per_minute=100)
    edge.script.says("a")
    assert edge.complete([5] * 50, max_tokens=40).status_code == 200


def test_the_bodies_of_a_key_hold_so_many_bytes_at_a_time(edge, limited):
    limited(bytes_in_flight=10_000)
    head = post_head("/v1/completions", "content-type: application/json", "content-length: 9000")
    with edge.raw() as connection:
        connection.sendall(head + b"{")
        eventually(lambda: edge.service.limiter.num_bytes == 9000)
        response = edge.complete("x" * 2000)
        message = response.json()["error"]["message"]
        assert response.status_code == 429
        assert message.startswith("The requests of this key may hold 10000 bytes at a time; this one needs 2")
        assert message.endswith(", the others hold 9000.")
        assert edge.complete("x", max_tokens=1).status_code == 200
    eventually(lambda: edge.service.limiter.num_bytes == 0)
    assert edge.complete("x" * 2000, max_tokens=1).status_code == 200


def test_all_keys_together_hold_so_many_bytes_and_the_next_is_told_to_come_again(edge):
    edge.reconfigure(limits={"bytes_in_flight": 10_000})
    head = post_head("/v1/completions", "content-type: application/json", "content-length: 9000")
    try:
        with edge.raw() as connection:
            connection.sendall(head + b"{")
            eventually(lambda: edge.service.limiter.num_bytes == 9000)
            response = edge.complete("x" * 2000, key=OTHER_KEY)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        message = "The service is at its limit of request bytes; try again."
        assert response.json() == error(message, "server_error", code="overloaded")
        eventually(lambda: edge.service.limiter.num_bytes == 0)
        assert edge.complete("x" * 2000, key=OTHER_KEY, max_tokens=1).status_code == 200
    finally:
        edge.reconfigure()


def test_a_body_without_a_length_counts_as_it_comes(edge, limited):
    limited(bytes_in_flight=10_000)
    head = post_head("/v1/completions", "content-type: application/json", "transfer-encoding: chunked")
    with edge.raw() as connection:
        connection.sendall(head + b"1f40\r\n" + b" " * 8000 + b"\r\n")
        eventually(lambda: edge.service.limiter.num_bytes == 8000)
        assert edge.complete("x" * 3000).status_code == 429


def test_an_ingress_with_all_it_may_have_under_way_refuses_the_next_at_once_and_answers_probes(model_folders):
    endless = FakeConfig(vocab_size=512, context_length=CONTEXT, step_s=0.01, reply_tokens=None)
    with running_edge(config_for(model_folders), endless, max_requests=2) as edge, ThreadPoolExecutor(2) as clients:
        running = [clients.submit(edge.complete, max_tokens=100) for _ in range(2)]
        eventually(lambda: edge.service.capacity.num_running == 2)
        refused = edge.complete(max_tokens=1, stream=True)
        message = "The service is at its limit of requests; try again."
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == error(message, "server_error", code="overloaded")
        assert edge.post("/completions", key="wrong").status_code == 401
        with edge.http(key=None) as client:
            assert client.get(f"http://127.0.0.1:{edge.port}/healthz").status_code == 200
        assert [client.result().status_code for client in running] == [200, 200]
        assert edge.complete(max_tokens=1).status_code == 200


async def resumed(edge: RunningEdge) -> None:
    edge.engine.resume()


async def paused(edge: RunningEdge) -> None:
    edge.engine.pause()


# --- keys ---


def test_an_expired_key_is_401_that_says_so(edge):
    edge.reconfigure(keys=[{**edge.config["keys"][0], "expires_at": "2001-01-01T00:00:00Z"}])
    try:
        response = edge.complete()
    finally:
        edge.reconfigure()
    assert response.status_code == 401
    assert response.json() == error("The API key has expired.", "authentication_error", code="invalid_api_key")


@pytest.mark.parametrize("key", ["ask_0123", "tml-0123", "sk-0123", "0123", "Bearer"])
def test_a_key_may_begin_with_anything(edge, key):
    edge.reconfigure(keys=[{"name": "any", "sha256": hashlib.sha256(key.encode()).hexdigest()}])
    try:
        assert edge.complete(key=key, max_tokens=1).status_code == 200
        assert edge.complete(key=KEY).status_code == 401
    finally:
        edge.reconfigure()
