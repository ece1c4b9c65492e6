"""Requests for marketplace slugs in the ledger: one record each, of the endpoint that answered, at its price."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from engines.fake import FakeConfig
from serve_app.config.marketplace import TokenBounds
from serve_app.ledger import schema
from tests.support.harness import BASE, CONTEXT, RunningEdge, config_for, running_edge
from tests.support.ledger.usage_records import INTERVAL_S, written
from tests.support.marketplace.slugs import SLUG, ask, ask_chat, endpoint_of, local, remote, slug
from tests.support.marketplace.upstream import Upstream
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.marketplace.slug_fixtures")

TEMPLATE = TokenBounds().template
CHEAP, DEAR = {"prompt": 1, "completion": 2}, {"prompt": 3, "completion": 5}


@pytest.fixture
def sold(model_folders: dict[str, str], tmp_path: Path, upstream: Upstream) -> Iterator[RunningEdge]:
    config = config_for(model_folders)
    (key, *others) = config["keys"]
    slugs = [
        slug(remote("far", upstream.url, price=CHEAP), local("here", price=DEAR)),
        slug(remote("far", upstream.url_as("500"), price=CHEAP), local("here", price=DEAR), id="acme/falls"),
        slug(
            remote("far", upstream.url_as("usage-never"), price=CHEAP, takes={"stream_usage": False}), id="acme/silent"
        ),
    ]
    config |= {
        "keys": [{**key, "limits": {"usd_per_day": 1}}, *others],
        "marketplace": {"slugs": slugs},
        "ledger": {"directory": str(tmp_path), "write_interval_s": INTERVAL_S},
    }
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        yield running


def booked(edge: RunningEdge) -> list[dict[str, Any]]:
    ledger = edge.service.ledger
    assert ledger is not None
    edge.wait_until_idle()
    written(ledger)
    with ledger._database.read() as connection:
        rows = connection.execute(select(schema.USAGE).order_by(schema.USAGE.c.ended_at)).mappings()
        return [dict(row) for row in rows]


def test_the_endpoint_that_answered_is_booked_at_its_price(sold: RunningEdge) -> None:
    assert endpoint_of(ask(sold)) == "far"
    (row,) = booked(sold)
    said = {name: row[name] for name in ("slug", "endpoint", "model", "prompt_tokens", "completion_tokens")}
    assert said == {
        "slug": SLUG,
        "endpoint": "far",
        "model": "their/model",
        "prompt_tokens": 7,
        "completion_tokens": 3,
    }
    assert (row["cost"], row["is_estimated"], row["outcome"]) == (7 * 1_000_000 + 3 * 2_000_000, False, "done")


def test_an_endpoint_that_failed_costs_nothing_and_leaves_nothing_held(sold: RunningEdge) -> None:
    assert endpoint_of(ask(sold, "acme/falls", max_tokens=4)) == "here"
    (row,) = booked(sold)
    assert (row["slug"], row["endpoint"], row["model"]) == ("acme/falls", "here", BASE)
    assert row["cost"] == row["prompt_tokens"] * 3_000_000 + row["completion_tokens"] * 5_000_000
    ledger = sold.service.ledger
    assert ledger is not None
    with ledger._database.read() as connection:
        assert list(connection.execute(select(schema.HOLDS))) == []


def test_usage_that_an_upstream_does_not_tell_is_booked_as_an_estimate(sold: RunningEdge) -> None:
    assert endpoint_of(ask(sold, "acme/silent", prompt="x" * 4000)) == "far"
    (row,) = booked(sold)
    assert row["is_estimated"]
    assert row["completion_tokens"] == 3
    assert row["cost"] == row["prompt_tokens"] * 1_000_000 + 3 * 2_000_000


def test_a_key_sees_its_slugs_and_not_the_models_behind_them(sold: RunningEdge) -> None:
    for model in (SLUG, SLUG, "acme/falls"):
        ask(sold, model)
    booked(sold)
    with sold.http() as client:
        usage = client.get("/usage", params={"by": "model"}).json()
    assert {row["model"]: row["requests"] for row in usage["data"]} == {SLUG: 2, "acme/falls": 1}


def held(edge: RunningEdge) -> int:
    """What the only request under way may cost, in 10^-12 USD."""
    ledger = edge.service.ledger
    assert ledger is not None
    with ledger._database.read() as connection:
        (cost,) = connection.scalars(select(schema.HOLDS.c.cost))
    return int(cost)


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_tokens": 100, "n": 3}, 300),
        ({"max_tokens": 100, "n": 2, "best_of": 5}, 500),
        ({"max_tokens": 100, "n": "3"}, 300),  # some upstreams take it
        ({"max_tokens": 100, "n": [], "best_of": "x"}, 100),
        ({"max_tokens": 100, "n": -1, "best_of": True}, 100),
    ],
)
def test_every_choice_that_an_upstream_may_make_is_held(
    sold: RunningEdge, upstream: Upstream, fields: dict[str, Any], most: int
) -> None:
    upstream.behaves("hang")
    body = {"model": SLUG, "prompt": "hi", "stream": True, **fields}
    with ThreadPoolExecutor(1) as others:
        asking = others.submit(sold.post, "/completions", **body)
        eventually(lambda: upstream.received)
        cost = held(sold)
        asking.result()
    text = json.dumps(body, separators=(",", ":"))
    num_prompt = len(text) + text.count(",") + text.count(":") + TEMPLATE
    assert cost == most * 2_000_000 + num_prompt * 1_000_000


@pytest.mark.parametrize(
    ("tokens", "fields", "most"),
    [
        ({}, {}, (None, 32_768)),
        ({"reply": 900}, {}, (None, 900)),
        ({"reply": 900}, {"n": 3}, (None, 2700)),
        ({"reply": 900, "context": 600}, {}, (600, 600)),
        ({"context": 600}, {"max_tokens": 5000}, (600, 600)),
        ({"template": 1}, {"max_tokens": 7}, (None, 7)),
    ],
)
def test_a_request_holds_what_its_endpoint_can_make_of_it(
    sold: RunningEdge, upstream: Upstream, tokens: dict[str, int], fields: dict[str, Any], most: tuple[int | None, int]
) -> None:
    sold.reconfigure(marketplace={"slugs": [slug(remote("far", upstream.url, price=CHEAP, tokens=tokens))]})
    upstream.behaves("hang")
    body = {"model": SLUG, "prompt": "!" * 2000, "stream": True, **fields}
    text = json.dumps(body, separators=(",", ":"))
    with ThreadPoolExecutor(1) as others:
        asking = others.submit(sold.post, "/completions", **body)
        eventually(lambda: upstream.received)
        cost = held(sold)
        asking.result()
    num_prompt, num_reply = most
    if num_prompt is None:
        num_prompt = len(text) + text.count(",") + text.count(":") + tokens.get("template", TEMPLATE)
    assert cost == num_prompt * 1_000_000 + num_reply * 2_000_000


def test_a_dense_prompt_holds_all_that_its_upstream_counts(sold: RunningEdge, upstream: Upstream) -> None:
    """Its budget is passed by one request at most: the second of two at the same time is refused."""
    (key, *others) = sold.config["keys"]
    sold.reconfigure(keys=[{**key, "limits": {"tokens_per_day": 4000}}, *others])
    upstream.behaves("hang")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask, sold, prompt="!?" * 2000, max_tokens=1)
        eventually(lambda: upstream.received)
        refused = ask(sold, prompt="!?" * 2000, max_tokens=1)
        asking.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")


def test_a_chat_holds_the_larger_of_its_limits(sold: RunningEdge, upstream: Upstream) -> None:
    """An upstream may know only one of them."""
    upstream.behaves("hang")
    with ThreadPoolExecutor(1) as others:
        asking = others.submit(ask_chat, sold, max_tokens=500, max_completion_tokens=1)
        eventually(lambda: upstream.received)
        assert held(sold) >= 500 * 2_000_000
        asking.result()


def test_what_slugs_cost_counts_for_the_budget_of_the_key(sold: RunningEdge, upstream: Upstream) -> None:
    dear = slug(remote("far", upstream.url, price={"prompt": 200_000, "completion": 0}))
    sold.reconfigure(marketplace={"slugs": [dear]})
    assert endpoint_of(ask(sold)) == "far"  # 7 tokens of 0.2 USD: 1.4 USD
    booked(sold)
    refused = ask(sold)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exceeded")
    assert len(upstream.received) == 1
