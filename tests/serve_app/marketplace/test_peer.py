"""A slug in front of a server of another project, such as vLLM's CPU build (`tests/bench/peer_vllm.sh` starts it):

    PEER_URL=http://127.0.0.1:8100/v1 PEER_MODEL=m python -m pytest -m peer tests/serve_app/marketplace

Each test asks the server directly and through the slug. Greedy replies must be the same.
"""

import os
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engines.fake import FakeConfig
from tests.support.harness import RunningEdge, config_for, running_edge

pytest_plugins = ("tests.support.edge_fixtures",)
PEER_URL, PEER_MODEL = os.environ.get("PEER_URL", ""), os.environ.get("PEER_MODEL", "m")
PEER_KEY = os.environ.get("PEER_KEY", "k")
pytestmark = [pytest.mark.peer, pytest.mark.skipif(not PEER_URL, reason="PEER_URL names no server")]

SLUG = "peer/model"
BODIES: dict[str, dict[str, Any]] = {
    "/completions": {"prompt": "The three primary colors are"},
    "/chat/completions": {"messages": [{"role": "user", "content": "Name three colours."}]},
}
GREEDY = {"max_tokens": 24, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def gateway(model_folders: dict[str, str]) -> Iterator[RunningEdge]:
    key = {"env": "PEER_KEY"}
    remote = {"url": PEER_URL, "model": PEER_MODEL, "key": key, "allow_private": True}
    endpoint = {"name": "there", "upstream": remote, "price": {"prompt": 0.1, "cached": 0.02, "completion": 0.4}}
    slugs = [{"id": SLUG, "allow_whole": True, "endpoints": [endpoint]}]
    os.environ.setdefault("PEER_KEY", PEER_KEY)
    with running_edge(
        config_for(model_folders) | {"marketplace": {"slugs": slugs}}, FakeConfig(vocab_size=512)
    ) as running:
        yield running


@pytest.fixture(params=list(BODIES))
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def direct() -> httpx.Client:
    return httpx.Client(base_url=PEER_URL, headers={"authorization": f"Bearer {PEER_KEY}"}, timeout=120, verify=False)


def both(gateway: RunningEdge, path: str, **fields: Any) -> tuple[httpx.Response, httpx.Response]:
    """The server's own answer, and the one through the slug."""
    body = {**BODIES[path], **GREEDY, **fields}
    with direct() as peer, gateway.http() as ours:
        return peer.post(path, json=body | {"model": PEER_MODEL}), ours.post(path, json=body | {"model": SLUG})


def chunks(gateway: RunningEdge, response: httpx.Response) -> list[dict[str, Any]]:
    *events, done = gateway.events(response)
    assert done == "[DONE]"
    return events


def said(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def reasons(events: list[dict[str, Any]]) -> list[str]:
    return [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]


def test_a_stream_says_the_same(gateway: RunningEdge, path: str) -> None:
    theirs, ours = (chunks(gateway, response) for response in both(gateway, path, stream=True))
    assert said(ours) == said(theirs) != ""
    assert reasons(ours) == reasons(theirs)
    assert {event["model"] for event in ours} == {SLUG}
    assert {name for event in ours for name in event} <= {name for event in theirs for name in event}
    assert not any(event.get("usage") for event in ours)


def test_usage_is_theirs(gateway: RunningEdge, path: str) -> None:
    asked = both(gateway, path, stream=True, stream_options={"include_usage": True})
    theirs, ours = (chunks(gateway, response) for response in asked)
    assert ours[-1]["usage"] == theirs[-1]["usage"]
    assert ours[-1]["choices"] == []


def test_usage_in_every_chunk_becomes_one(gateway: RunningEdge, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}  # vLLM's own
    theirs, ours = (chunks(gateway, response) for response in both(gateway, path, stream=True, stream_options=options))
    assert ours[-1]["usage"] == theirs[-1]["usage"]
    assert said(ours) == said(theirs)


def test_a_whole_reply_says_the_same(gateway: RunningEdge, path: str) -> None:
    theirs, ours = (response.json() for response in both(gateway, path))
    assert said_whole(ours) == said_whole(theirs) != ""
    assert ours["usage"] == theirs["usage"]
    assert ours["model"] == SLUG


def said_whole(reply: dict[str, Any]) -> str:
    (choice,) = reply["choices"]
    return str(choice.get("text") or choice["message"]["content"])


def test_fields_that_we_do_not_know_go_both_ways(gateway: RunningEdge, path: str) -> None:
    """`min_tokens` is vLLM's own: with it, a stop text does not end a reply at once."""
    theirs, ours = both(gateway, path, stream=True, min_tokens=20, stop=["a", "e"])
    assert said(chunks(gateway, ours)) == said(chunks(gateway, theirs))


def test_a_refusal_passes_through(gateway: RunningEdge, path: str) -> None:
    theirs, ours = both(gateway, path, stream=True, max_tokens=10_000_000)
    error = theirs.json()
    assert (ours.status_code, theirs.status_code) == (400, 400)
    assert ours.json()["error"]["message"] == error.get("error", error)["message"]


def test_the_sdk_streams_through_it(gateway: RunningEdge) -> None:
    with gateway.sdk() as client:
        stream = client.completions.create(model=f"{SLUG}/ep/there", prompt="One, two,", max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=f"{SLUG}/ep/nowhere", prompt="x", stream=True)
