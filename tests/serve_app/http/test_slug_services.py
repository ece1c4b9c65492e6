"""A service whose slugs lead to other services: instances of this one, and processes that die."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake import FakeConfig
from serve_app.api.record import Outcome
from tests.support.harness import BASE, CHAT, CONTEXT, KEY, RunningEdge, config_for, running_edge
from tests.support.marketplace.slugs import (
    SLUG,
    Sell,
    ask,
    ask_chat,
    endpoint_of,
    listed,
    local,
    priced,
    remote,
    slug,
    text_of,
)
from tests.support.marketplace.upstream import UpstreamProcess, upstream_process
from tests.support.waiting import eventually
from tests.support.wire import refused

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

COLORS = " red, yellow and blue."
REQUESTS = 64


@pytest.fixture(scope="module")
def running_far(model_folders: dict[str, str]) -> Iterator[RunningEdge]:
    with running_edge(config_for(model_folders), FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        yield running


@pytest.fixture
def far(running_far: RunningEdge) -> Iterator[RunningEdge]:
    """The other service."""
    with running_far.in_first_state() as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text(KEY)
    return {"file": str(tmp_path / "key")}


def to(far: RunningEdge, key_file: Any, model: str = BASE, **fields: Any) -> dict[str, Any]:
    patient = {"first_byte_timeout_s": 30.0, "idle_timeout_s": 30.0, "takes": {"prompt_cache_key": True}}
    return remote("far", far.url, model=model, key=key_file, **patient, **fields)


def test_completions_and_chats_of_another_service_come_through(
    edge: RunningEdge, far: RunningEdge, sell: Sell, key_file: Any
) -> None:
    sell(slug(to(far, key_file), id="acme/text"), slug(to(far, key_file, CHAT), id="acme/chat"))
    far.script.says(COLORS)
    for response in (ask(edge, "acme/text", max_tokens=50), ask_chat(edge, "acme/chat")):
        assert (text_of(edge, response), endpoint_of(response)) == (COLORS, "far")
    edge.wait_until_idle()
    far.wait_until_idle()
    assert [record.model for record in far.recorder.ended] == [BASE, CHAT]
    for here, there in zip(edge.recorder.ended[-2:], far.recorder.ended, strict=True):
        assert here.model == there.model
        assert (here.prompt_tokens, here.completion_tokens) == (there.prompt_tokens, there.completion_tokens)
        assert (here.outcome, here.finish_reason, here.is_estimated) == (Outcome.DONE, "stop", False)
    assert edge.script.requests == []


def test_a_reply_is_the_same_here_or_there_streamed_or_whole(
    edge: RunningEdge, far: RunningEdge, sell: Sell, key_file: Any
) -> None:
    sell(local("here"), to(far, key_file), allow_whole=True)
    fields: dict[str, Any] = {"max_tokens": 20, "seed": 5, "logprobs": 2, "temperature": 1.5, "return_token_ids": True}
    wholes = [ask(edge, f"{SLUG}/ep/{name}", stream=False, **fields).json() for name in ("here", "far")]
    (here,), (there,) = (whole["choices"] for whole in wholes)
    assert here == there
    assert wholes[0]["usage"] == wholes[1]["usage"]
    options = {"stream_options": {"include_usage": True}}
    for name in ("here", "far"):
        response = ask(edge, f"{SLUG}/ep/{name}", **fields, **options)
        *chunks, usage, _ = edge.events(response)
        assert text_of(edge, response) == here["text"]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == here["token_ids"]
        assert usage["usage"] == wholes[0]["usage"]


def test_a_refusal_of_the_other_service_passes_through_whole(
    edge: RunningEdge, far: RunningEdge, sell: Sell, key_file: Any
) -> None:
    sell(to(far, key_file), local("here"))
    assert refused(ask(edge, top_p=0)) == ("top_p must be greater than 0, got 0.", "top_p")
    response = ask(edge, prompt="x" * 2 * CONTEXT)
    assert refused(response)[1] == "prompt"
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert [item["health"] for item in listed(edge)] == ["up", "up"]


def test_a_client_that_leaves_ends_the_generation_of_the_other_service(
    edge: RunningEdge, far: RunningEdge, sell: Sell, key_file: Any
) -> None:
    sell(to(far, key_file))
    far.script.says_and_hangs("a", far.engine)
    with httpx.Client(base_url=edge.url, headers={"authorization": f"Bearer {KEY}"}, timeout=30) as client:
        body = {"model": SLUG, "prompt": "x", "stream": True, "max_tokens": 100}
        with client.stream("POST", "/completions", json=body) as response:
            content = response.iter_bytes()
            assert b"data: " in next(content)
            assert far.engine.stats().running == 1
    eventually(lambda: far.engine.stats().running == 0, timeout_s=2)


def test_a_key_that_the_other_service_does_not_know_is_the_operators_fault(
    edge: RunningEdge, far: RunningEdge, sell: Sell, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("rh-a-key-that-nobody-has")
    sell(to(far, {"file": str(tmp_path / "wrong")}), local("here"))
    assert endpoint_of(ask(edge)) == "here"
    assert listed(edge)[0]["health"] == "cooling"


def test_the_cache_key_reaches_the_other_service(
    edge: RunningEdge, far: RunningEdge, sell: Sell, key_file: Any
) -> None:
    sell(to(far, key_file))
    response = ask(edge, prompt_cache_key="x" * 1024, suffix="unknown")
    assert response.status_code == 200


# --- a service without models ---


def test_a_service_may_have_slugs_only(far: RunningEdge, key_file: Any) -> None:
    config = {
        "keys": config_for({"chat": "", "base": ""})["keys"][:1],
        "marketplace": {"slugs": [slug(to(far, key_file))]},
    }
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as gateway:
        gateway.service.require_configuration()
        with gateway.http() as client:
            assert client.get("../readyz").json() == {"status": "ready"}
            assert [item["id"] for item in client.get("/models").json()["data"]] == [SLUG]
        far.script.says(COLORS)
        assert text_of(gateway, ask(gateway, max_tokens=50)) == COLORS
        long = ask(gateway, prompt="x," * 50_000)
        assert long.json()["error"]["code"] == "context_length_exceeded"
        assert ask(gateway, prompt=list(range(50_000))).json()["error"]["param"] == "prompt"
        assert ask(gateway, BASE).status_code == 404
        gateway.wait_until_idle()


def test_a_service_of_nothing_is_not_ready() -> None:
    config = {"keys": config_for({"chat": "", "base": ""})["keys"][:1], "models": []}
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as nothing, nothing.http() as client:
        assert client.get("../readyz").status_code == 503


# --- floods ---


async def flood(edge: RunningEdge, count: int) -> list[httpx.Response]:
    """So many requests at the same time, read to their end."""
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=edge.url, headers=headers, timeout=60, limits=limits) as client:
        body = {"model": SLUG, "prompt": "x", "stream": True, "max_tokens": 10}
        return await asyncio.gather(*(client.post("/completions", json=body) for _ in range(count)))


def has_got(upstream: UpstreamProcess, count: int) -> bool:
    return len(upstream.control()["received"]) >= count


def test_no_request_is_lost_when_an_endpoint_dies_before_its_first_bytes(edge: RunningEdge, sell: Sell) -> None:
    edge.script.says("here")
    with upstream_process("slow-first-byte") as dying:
        sell(remote("dies", dying.url, first_byte_timeout_s=60.0), local("here", price=priced(2, 2)))

        async def flood_and_kill() -> list[httpx.Response]:
            flooding = asyncio.create_task(flood(edge, REQUESTS))
            await asyncio.to_thread(eventually, lambda: has_got(dying, REQUESTS))
            await asyncio.to_thread(dying.kill)
            return await flooding

        responses = asyncio.run(flood_and_kill())
    assert [text_of(edge, response) for response in responses] == ["here"] * REQUESTS
    assert {endpoint_of(response) for response in responses} == {"here"}
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]


def test_of_streams_whose_endpoint_dies_midway_each_says_so_and_none_is_lost_before_its_first_byte(
    edge: RunningEdge, sell: Sell
) -> None:
    edge.script.says("here")
    with upstream_process("paced") as dying:
        sell(remote("dies", dying.url, first_byte_timeout_s=60.0), local("here", price=priced(2, 2)))

        async def flood_and_kill() -> list[httpx.Response]:
            first = asyncio.create_task(flood(edge, REQUESTS // 2))
            await asyncio.to_thread(eventually, lambda: has_got(dying, REQUESTS // 2))
            second = asyncio.create_task(flood(edge, REQUESTS // 2))
            await asyncio.to_thread(dying.kill)
            return [*await first, *await second]

        responses = asyncio.run(flood_and_kill())
    assert [response.status_code for response in responses] == [200] * REQUESTS
    ends: Counter[tuple[str, str]] = Counter()
    for response in responses:
        *_, last = edge.events(response)
        end = "done" if last == "[DONE]" else last["error"]["code"]
        ends[response.headers["x-endpoint"], end] += 1
    assert set(ends) <= {("dies", "upstream_failed"), ("here", "done")}
    assert ends["dies", "upstream_failed"] >= 1
    assert ends["here", "done"] >= 1
    edge.wait_until_idle()
    assert [item["health"] for item in listed(edge)] == ["cooling", "up"]
