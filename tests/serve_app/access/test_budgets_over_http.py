"""Budgets as callers meet them: one answer for each limit, over one ingress and over two."""

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeConfig
from serve_app.ledger.database import Database
from serve_app.ledger.sums import Range, sum_up, total
from tests.support.harness import BASE, CONTEXT, RunningEdge, config_for, running_edge
from tests.support.ledger.ledger_service import ServiceProcess, service_process
from tests.support.ledger.usage_records import INTERVAL_S, written
from tests.support.waiting import eventually
from tests.support.wire import error

pytest_plugins = ("tests.support.edge_fixtures", "tests.support.ledger.ledger_fixtures")

PRICE = {"prompt": 100_000, "completion": 1_000_000}  # 0.1 USD and 1 USD a token


def priced(model_folders: dict[str, str], **ledger: Any) -> dict[str, Any]:
    config = config_for(model_folders)
    models = [{**model, "price": PRICE} for model in config["models"]]
    return {**config, "models": models, "ledger": {"write_interval_s": INTERVAL_S, **ledger}}


@pytest.fixture(scope="module")
def module_edge(model_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    config = priced(model_folders, directory=str(tmp_path_factory.mktemp("ledger")))
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        yield running


@pytest.fixture
def limited(module_edge: RunningEdge) -> Iterator[Callable[..., RunningEdge]]:
    """Gives the test's key these limits, and a name of its own: what is spent is kept by the name."""
    name = uuid.uuid4().hex

    def limit(**limits: Any) -> RunningEdge:
        module_edge.reconfigure(keys=[{**module_edge.config["keys"][0], "name": name, "limits": limits}])
        return module_edge

    yield limit
    module_edge.engine.resume()
    module_edge.wait_until_idle()
    module_edge.reconfigure()


def settle(edge: RunningEdge) -> None:
    edge.wait_until_idle()
    ledger = edge.service.ledger
    assert ledger is not None
    written(ledger)


@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        ({"usd_per_day": 4.5}, "This key may spend 4.5 USD per day (UTC); it is used up."),
        ({"usd_per_month": "5.2"}, "This key may spend 5.2 USD per month (UTC); it is used up."),
        ({"tokens_per_day": 7}, "This key may use 7 tokens per day (UTC); it is used up."),
        ({"tokens_per_month": 7}, "This key may use 7 tokens per month (UTC); it is used up."),
    ],
)
def test_a_key_that_has_spent_its_budget_is_429_and_nothing_is_run(
    limited: Callable[..., RunningEdge], limits: dict[str, Any], sentence: str
) -> None:
    edge = limited(**limits)
    edge.script.requests.clear()
    assert edge.complete("hi", max_tokens=5).status_code == 200  # 5.2 USD, 7 tokens
    settle(edge)
    for response in (edge.complete("hi", max_tokens=5, stream=True), edge.chat()):
        assert response.status_code == 429
        assert response.json() == error(sentence, "rate_limit_error", code="budget_exceeded")
        assert response.headers["retry-after"] == "30"
    assert len(edge.script.requests) == 1
    with edge.http() as client:
        assert client.get("/models").status_code == 200
        assert client.get("/usage").json()["total"]["cost_usd"] == "5.2"


def test_a_request_holds_the_most_that_it_can_cost_until_it_ends(limited: Callable[..., RunningEdge]) -> None:
    edge = limited(usd_per_day=20)
    edge.engine.pause()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(edge.complete, "hi", max_tokens=20)
        eventually(lambda: edge.engine.stats().waiting)
        refused = edge.complete("hi", max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["message"] == (
            "This key may spend 20 USD per day (UTC); 20 USD are left, and its requests under way may need 20 USD."
        )
        assert refused.headers["retry-after"] == "1"
        edge.script.says("a")  # for those that follow
        edge.engine.resume()
        assert running.result().status_code == 200
    settle(edge)


def test_what_a_request_did_not_need_is_free_again(limited: Callable[..., RunningEdge]) -> None:
    edge = limited(usd_per_day=30)
    edge.script.says("a")
    for _ in range(10):  # each may cost 29.2 and costs 2.2
        assert edge.complete("hi", max_tokens=29).status_code == 200
    edge.script.makes_something_up()


def test_a_refused_and_a_failed_request_cost_nothing(limited: Callable[..., RunningEdge]) -> None:
    edge = limited(usd_per_day=5)
    for _ in range(3):
        assert edge.complete(temperature=-1).status_code == 400
        assert edge.complete("hi", max_tokens=CONTEXT + 1).status_code == 400
        settle(edge)
    assert edge.complete("hi", max_tokens=3).status_code == 200


def test_a_budget_refusal_does_not_count_against_the_requests_of_the_minute(
    limited: Callable[..., RunningEdge],
) -> None:
    edge = limited(usd_per_day=5, requests_per_minute=2)
    edge.engine.pause()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(edge.complete, "hi", max_tokens=5)
        eventually(lambda: edge.engine.stats().waiting)
        codes = [edge.complete("hi", max_tokens=1).json()["error"]["code"] for _ in range(3)]
        edge.engine.resume()
        assert running.result().status_code == 200
    assert codes == ["budget_exceeded"] * 3


def test_requests_go_on_without_waiting_when_the_database_is_away(
    model_folders: dict[str, str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    config = priced(model_folders, directory=str(tmp_path), url=url)
    config["keys"][0]["limits"] = {"usd_per_day": 20}
    other = Database.of(url)
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge:
        assert edge.complete("hi", max_tokens=5).status_code == 200
        settle(edge)
        with other.alone():  # nobody else can write
            codes = [edge.complete("hi", max_tokens=5).status_code for _ in range(4)]
            assert codes == [200, 200, 200, 429]  # 5.2 each: it knows what was spent before
            edge.wait_until_idle()
            with edge.http() as client:
                assert client.get("/usage").status_code in (200, 503)
        settle(edge)
        assert total(sum_up(other, ("key",), Range())).requests == 4
        with edge.http() as client:
            assert client.get("/usage").json()["total"]["cost_usd"] == "20.8"
    other.close()


@pytest.mark.slow
def test_a_flood_over_two_ingresses_passes_a_budget_by_less_than_one_request(
    model_folders: dict[str, str], tmp_path: Path, database_url: str
) -> None:
    """Each request costs 3.2 USD at most, and the key has 50."""
    config = priced(model_folders, directory=str(tmp_path), url=database_url)
    config["keys"][0]["limits"] = {"usd_per_day": 50}
    config["models"] = [model for model in config["models"] if model["id"] == BASE]
    config["keys"] = config["keys"][:1]
    stop = threading.Event()

    def flood(service: ServiceProcess) -> list[int]:
        statuses = []
        with service.client() as client:
            while not stop.is_set():
                body = {"model": BASE, "prompt": "hi", "max_tokens": 3}
                response = client.post("/completions", json=body)
                statuses.append(response.status_code)
                if response.status_code == 429 and "it is used up" in response.text:
                    break
        return statuses

    with service_process(config) as one, service_process(config) as two, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(flood, service) for service in (one, two) for _ in range(8)]
        statuses = [status for each in waiting for status in each.result(120)]
    assert set(statuses) == {200, 429}
    database = Database.of(database_url)
    spent = total(sum_up(database, ("key",), Range()))
    database.close()
    assert spent.requests == statuses.count(200)
    assert 50 * 10**12 <= spent.cost < (50 + 3.2) * 10**12
