"""Each request that was asked of a model is in the ledger once, with its numbers, before the client has its end."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from engines.fake import FakeConfig
from engines.interface.errors import EngineStopped, QueueFull
from serve_app.ledger import schema
from serve_app.ledger.ledger import Ledger
from serve_app.ledger.record import parse_line
from serve_app.ledger.sums import Range, sum_up, total
from tests.support.harness import BASE, CHAT, CONTEXT, RunningEdge, StoredCheckpoint, config_for, running_edge
from tests.support.ledger.ledger_service import service_process
from tests.support.ledger.usage_records import INTERVAL_S, open_ledger, spooled, written
from tests.support.waiting import eventually
from tests.support.wire import post_head

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.ledger.ledger_fixtures")

PRICE = {"prompt": 0.1, "cached": "0.02", "completion": 0.4}
PER_PROMPT, PER_CACHED, PER_COMPLETION = 100_000, 20_000, 400_000  # 10^-12 USD

STREAMED = {"model": BASE, "prompt": "hi", "stream": True}


def priced(model_folders: dict[str, str], **ledger: Any) -> dict[str, Any]:
    config = config_for(model_folders)
    models = [{**model, "price": PRICE} for model in config["models"]]
    return {**config, "models": models, "ledger": ledger}


@pytest.fixture(scope="module")
def module_edge(model_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    config = priced(model_folders, directory=str(tmp_path_factory.mktemp("ledger")), write_interval_s=INTERVAL_S)
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        yield running


@pytest.fixture
def booked(module_edge: RunningEdge) -> Iterator[RunningEdge]:
    with module_edge.in_first_state() as running:
        yield running


def rows_of(edge: RunningEdge, request_id: str) -> list[dict[str, Any]]:
    ledger = edge.service.ledger
    assert ledger is not None
    edge.wait_until_idle()
    written(ledger)
    with ledger._database.read() as connection:
        query = select(schema.USAGE).where(schema.USAGE.c.request_id == request_id)
        return [dict(row) for row in connection.execute(query).mappings()]


def ask(edge: RunningEdge, request_id: str, path: str = "/completions", **body: Any) -> int:
    given = {"model": BASE, "prompt": "hi", **body} if path == "/completions" else {"model": CHAT, **body}
    with edge.http() as client:
        return client.post(path, json=given, headers={"x-request-id": request_id}).status_code


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_booked_with_its_numbers_and_its_exact_cost(booked: RunningEdge, stream: bool) -> None:
    booked.script.says("abc")
    for number in (1, 2):  # the second finds the first one's prompt in the cache
        ask(
            booked,
            f"numbers-{stream}-{number}",
            prompt=list(range(100 + 40 * stream, 140 + 40 * stream)),
            stream=stream,
        )
    first, second = (rows_of(booked, f"numbers-{stream}-{number}")[0] for number in (1, 2))
    expected = {
        "key": "test",
        "api": "completions",
        "model": BASE,
        "prompt_tokens": 40,
        "cached_tokens": 0,
        "completion_tokens": 4,
        "prompt_price": PER_PROMPT,
        "cached_price": PER_CACHED,
        "completion_price": PER_COMPLETION,
        "cost": 40 * PER_PROMPT + 4 * PER_COMPLETION,
        "is_streamed": stream,
        "status": 200,
        "outcome": "done",
        "finish_reason": "stop",
    }
    assert {name: first[name] for name in expected} == expected
    assert second["cached_tokens"] == 32
    assert second["cost"] == 8 * PER_PROMPT + 32 * PER_CACHED + 4 * PER_COMPLETION
    assert 0 < first["first_token_s"] <= first["total_s"] < 30


def test_reasoning_and_checkpoints_are_booked(booked: RunningEdge) -> None:
    path = "tinker://r/sampler_weights/n"
    booked.checkpoints.held[path] = StoredCheckpoint("digest-1")
    booked.script.says("<think>one two</think>yes")
    ask(booked, "thinks", "/chat/completions", model=path, messages=[{"role": "user", "content": "hi"}])
    (row,) = rows_of(booked, "thinks")
    assert (row["api"], row["model"], row["checkpoint"], row["digest"]) == ("chat", CHAT, path, "digest-1")
    assert 0 < row["reasoning_tokens"] < row["completion_tokens"]


OUTCOMES: list[tuple[str, dict[str, Any], Any, tuple[int, str, str, int, int]]] = [
    ("refused", {"temperature": -1}, None, (400, "refused", "invalid_request_error", 0, 0)),
    ("unknown", {"model": "made up"}, None, (404, "refused", "model_not_found", 0, 0)),
    ("failed", {}, [EngineStopped("x")], (503, "failed", "unavailable", 0, 0)),
    ("failed later", {"stream": True}, ["a", "b", EngineStopped("x")], (503, "failed", "unavailable", 2, 2)),
    ("failed whole", {}, ["a", "b", EngineStopped("x")], (503, "failed", "unavailable", 2, 2)),
]


@pytest.mark.parametrize(("name", "fields", "reply", "expected"), OUTCOMES, ids=lambda value: str(value)[:20])
def test_every_outcome_is_booked_once_and_costs_what_was_run(
    booked: RunningEdge, name: str, fields: dict[str, Any], reply: Any, expected: tuple[int, str, str, int, int]
) -> None:
    if reply is not None:
        items = [item for part in reply for item in (booked.script.encode(part) if isinstance(part, str) else [part])]
        booked.script.reply = lambda request: items
    request_id = name.replace(" ", "-")
    ask(booked, request_id, **fields)
    (row,) = rows_of(booked, request_id)
    found = tuple(row[column] for column in ("status", "outcome", "error_code", "prompt_tokens", "completion_tokens"))
    assert found == expected
    assert row["cost"] == expected[3] * PER_PROMPT + expected[4] * PER_COMPLETION


def test_a_reply_that_breaks_a_rule_costs_what_was_generated(booked: RunningEdge) -> None:
    booked.script.says("no call")
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}]
    ask(booked, "broke", "/chat/completions", messages=messages, tools=tools, tool_choice="required")
    (row,) = rows_of(booked, "broke")
    assert (row["status"], row["outcome"]) == (422, "refused")
    assert row["completion_tokens"] > 1
    assert row["cost"] == row["prompt_tokens"] * PER_PROMPT + row["completion_tokens"] * PER_COMPLETION


def test_what_was_not_asked_of_a_model_or_hit_a_limit_is_not_booked(booked: RunningEdge) -> None:
    ledger = booked.service.ledger
    assert ledger is not None
    booked.wait_until_idle()
    before = ledger.num_appended
    with booked.http() as client:
        for path in ("/models", "/usage", f"/models/{BASE}"):
            assert client.get(path).status_code == 200
        assert client.post("/nowhere", json={}).status_code == 404
        assert client.post("/models", json={}).status_code == 405
    assert booked.post("/completions", "a wrong key", model=BASE, prompt="x").status_code == 401
    booked.script.reply = lambda request: [QueueFull(1)]
    assert ask(booked, "full") == 429
    booked.wait_until_idle()
    assert ledger.num_appended == before


@pytest.mark.parametrize("content", ["", "abc"])
def test_a_client_that_leaves_pays_for_what_it_had(booked: RunningEdge, content: str) -> None:
    request_id = f"left-{len(content)}"
    booked.script.says_and_hangs(content or "a", booked.engine)
    if not content:
        booked.engine.pause()
    body = json.dumps({"model": BASE, "prompt": "hi", "stream": True}).encode()
    head = post_head(
        "/v1/completions",
        f"x-request-id: {request_id}",
        f"content-length: {len(body)}",
        "content-type: application/json",
    )
    with booked.raw() as client:
        client.sendall(head + body)
        if content:
            received = b""
            while b'"c"' not in received:
                received += client.recv(65536)
        else:
            eventually(lambda: booked.engine.stats().waiting)
        client.shutdown(socket.SHUT_RDWR)
    eventually(lambda: not booked.recorder.running)
    booked.engine.resume()
    (row,) = rows_of(booked, request_id)
    assert (row["outcome"], row["prompt_tokens"]) == ("left", 2)
    assert row["completion_tokens"] == len(content)
    assert row["cost"] == 2 * PER_PROMPT + len(content) * PER_COMPLETION


def test_a_model_without_a_price_costs_nothing(model_folders: dict[str, str], tmp_path: Path) -> None:
    config = {**config_for(model_folders), "ledger": {"directory": str(tmp_path), "write_interval_s": INTERVAL_S}}
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge:
        ask(edge, "free", max_tokens=2)
        (row,) = rows_of(edge, "free")
    assert (row["cost"], row["prompt_price"], row["completion_tokens"]) == (0, None, 2)


# --- when it is on disk ---


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_record_is_on_disk_before_the_client_has_the_last_byte(
    model_folders: dict[str, str], tmp_path: Path, stream: bool
) -> None:
    """The service is killed as soon as its answer is there."""
    config = priced(model_folders, directory=str(tmp_path), write_interval_s=3600)
    with service_process(config) as service:
        responses = [service.complete(max_tokens=5, stream=stream) for _ in range(3)]
        service.process.kill()
    assert [response.status_code for response in responses] == [200] * 3
    assert "[DONE]" in responses[-1].text or not stream
    lines = [line for path in tmp_path.glob("spool/*/*.jsonl") for line in path.read_bytes().splitlines()]
    assert [parse_line(line).completion_tokens for line in lines] == [5, 5, 5]
    with open_ledger(tmp_path) as ledger:
        eventually(lambda: ledger.report.counters.adopted == 1)
        found = total(sum_up(ledger._database, ("key",), Range()))
    assert found.cost == 3 * (2 * PER_PROMPT + 5 * PER_COMPLETION)


@pytest.mark.slow
def test_an_orderly_end_writes_all(model_folders: dict[str, str], tmp_path: Path) -> None:
    with service_process(priced(model_folders, directory=str(tmp_path), write_interval_s=3600)) as service:
        assert service.complete(max_tokens=5).status_code == 200
    assert spooled(tmp_path) == 0
    with open_ledger(tmp_path) as ledger:
        assert total(sum_up(ledger._database, ("key",), Range())).requests == 1


@pytest.mark.parametrize("ends_before_the_ledger", [True, False])
def test_requests_under_way_when_the_service_stops_are_booked(
    model_folders: dict[str, str], tmp_path: Path, ends_before_the_ledger: bool
) -> None:
    config = priced(model_folders, directory=str(tmp_path), write_interval_s=3600)
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge:
        edge.script.says_and_hangs("abc", edge.engine)
        with edge.http() as client, client.stream("POST", "/completions", json={**STREAMED}) as response:
            received = response.iter_text()
            while '"c"' not in next(received):
                pass
            if not ends_before_the_ledger:
                assert edge.service.ledger is not None
                edge.service.ledger.close()
            edge.run(edge.service.close())
            edge.engine.resume()
    with open_ledger(tmp_path) as ledger:
        eventually(lambda: ledger.is_up and not spooled(tmp_path))
        found = total(sum_up(ledger._database, ("key",), Range()))
    assert (found.requests, found.prompt_tokens, found.completion_tokens) == (1, 2, 3)


# --- changes of the configuration ---


def test_a_ledger_comes_changes_and_goes_while_the_service_runs(model_folders: dict[str, str], tmp_path: Path) -> None:
    def count(folder: str) -> int:
        with open_ledger(tmp_path / folder) as ledger:
            return total(sum_up(ledger._database, ("key",), Range())).requests

    config = config_for(model_folders)
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge:
        ask(edge, "before", max_tokens=1)
        edge.reconfigure(ledger={"directory": str(tmp_path / "one"), "write_interval_s": 3600})
        first = edge.service.ledger
        assert isinstance(first, Ledger)
        ask(edge, "one", max_tokens=1)
        edge.reconfigure(ledger={"directory": str(tmp_path / "two")})
        assert count("one") == 1  # the one that is replaced writes what it has
        ask(edge, "two", max_tokens=1)
        same = edge.service.ledger
        edge.reconfigure(ledger={"directory": str(tmp_path / "two")}, limits={"messages": 9})
        assert edge.service.ledger is same
        edge.reconfigure(ledger={"directory": "/dev/null/x"})
        assert edge.service.ledger is same
        assert edge.service.config_error is not None
        assert "ledger.directory must be a folder that can be written" in edge.service.config_error
        edge.reconfigure()
        assert edge.service.ledger is None
        ask(edge, "after", max_tokens=1)
    assert (count("one"), count("two")) == (1, 1)
