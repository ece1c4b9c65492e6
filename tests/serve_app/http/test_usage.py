"""`GET /v1/usage` says what the caller's own key has used, in any range, and nothing of others."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.fake import FakeConfig
from serve_app.base.errors import LimitReached
from serve_app.http.app import PREFIXES
from serve_app.http.usage import Questions
from serve_app.ledger.record import microseconds
from tests.serve_app.http.test_openapi import check
from tests.support.harness import CONTEXT, OTHER_KEY, RunningEdge, config_for, running_edge
from tests.support.ledger.usage_records import INTERVAL_S, NOON, usage_record, written
from tests.support.waiting import eventually
from tests.support.wire import error

pytest_plugins = ("tests.support.edge_fixtures",)

RANGE = {"from": "2031-01-01", "to": "2031-12-31"}
TIMES = "must be a date such as 2031-01-31, or a time with its zone such as 2031-01-31T12:00:00Z"


@pytest.fixture(scope="module")
def booked(model_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEdge]:
    """Usage of two keys: three days, a slug, and requests that no model took."""
    ledger = {"directory": str(tmp_path_factory.mktemp("ledger")), "write_interval_s": INTERVAL_S}
    config = {**config_for(model_folders), "ledger": ledger}
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as running:
        kept = running.service.ledger
        assert kept is not None
        groups = [("a/b", ""), ("a/b", ""), ("their-secret-name", "acme/tri"), ("other-secret", "acme/tri"), ("", "")]
        for number, (model, slug) in enumerate(groups):
            ended_us = microseconds(NOON + timedelta(hours=12 * number))
            record = usage_record(model=model, slug=slug, cost=10**number, ended_us=ended_us)
            running.loop.call_soon_threadsafe(kept.append, record)
        running.loop.call_soon_threadsafe(kept.append, usage_record(key="other", cost=77))
        running.run(running.service.workers.run(0, lambda: None))
        written(kept)
        yield running


def usage(edge: RunningEdge, key: str | None = None, **params: str) -> Any:
    with edge.http() if key is None else edge.http(key) as client:
        response = client.get("/usage", params={**RANGE, **params})
    assert response.status_code == 200, response.text
    check("UsageList", response.json())
    return response.json()


def costs(body: Any) -> dict[str | None, str]:
    return {row[body["by"]]: row["cost_usd"] for row in body["data"]}


def test_usage_is_summed_by_day_with_exact_costs(booked: RunningEdge) -> None:
    body = usage(booked)
    assert (body["from"], body["to"]) == ("2031-01-01T00:00:00Z", "2032-01-01T00:00:00Z")
    assert costs(body) == {
        "2031-01-31": "0.000000000001",
        "2031-02-01": "0.00000000011",
        "2031-02-02": "0.000000011",
    }
    assert body["data"][1] == {
        "object": "usage",
        "day": "2031-02-01",
        "requests": 2,
        "prompt_tokens": 20,
        "cached_tokens": 0,
        "completion_tokens": 10,
        "reasoning_tokens": 0,
        "image_tokens": 0,
        "cost_usd": "0.00000000011",
    }
    assert (body["total"]["requests"], body["total"]["cost_usd"]) == (5, "0.000000011111")


def test_of_a_slug_callers_see_its_name_and_not_what_ran(booked: RunningEdge) -> None:
    body = usage(booked, by="model")
    assert costs(body) == {None: "0.00000001", "a/b": "0.000000000011", "acme/tri": "0.0000000011"}
    assert "secret" not in str(body)


def test_a_key_sees_its_own_usage_only(booked: RunningEdge) -> None:
    assert costs(usage(booked, OTHER_KEY)) == {"2031-01-31": "0.000000000077"}


def test_a_date_as_the_end_is_included_and_a_time_is_not(booked: RunningEdge) -> None:
    def count(first: str, last: str) -> int:
        return usage(booked, **{"from": first, "to": last})["total"]["requests"]

    assert count("2031-01-31", "2031-01-31") == 1
    assert count("2031-01-31", "2031-02-01") == 3
    assert count("2031-01-31", "2031-02-01T00:00:00Z") == 1
    assert count("2031-01-31T12:00:00Z", "2031-02-01T00:00:00.000001Z") == 2
    assert count("2031-01-31T13:00:00+01:00", "2031-02-01T01:00:00+01:00") == 1
    assert count("2031-01-31T12:00:00.000001Z", "2031-02-02") == 4


def test_a_range_of_times_reads_whole_days_from_their_sums(booked: RunningEdge) -> None:
    def asked(first: str, last: str) -> list[tuple[str, int]]:
        rows = usage(booked, **{"from": first, "to": last})["data"]
        return [(row["day"], row["requests"]) for row in rows]

    assert asked("2031-01-31T12:00:00Z", "2031-02-02T00:00:00.000001Z") == [
        ("2031-01-31", 1),
        ("2031-02-01", 2),
        ("2031-02-02", 1),
    ]
    assert asked("2031-02-01T11:00:00Z", "2031-02-02T12:00:00Z") == [("2031-02-01", 1), ("2031-02-02", 1)]
    assert asked("2031-01-30T11:00:00Z", "2031-01-31T12:00:00.000001Z") == [("2031-01-31", 1)]


def test_days_that_are_cut_and_have_too_many_requests_are_refused(
    booked: RunningEdge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.ledger.ledger.MOST_ROWS", 1)
    cut = {"from": "2031-02-01T00:00:00.000001Z", "to": "2031-02-03"}
    assert usage(booked, **cut)["total"]["requests"] == 3
    with booked.http() as client:
        response = client.get("/usage", params={**cut, "to": "2031-02-02T13:00:00Z"})
    words = "the days that they cut must have at most 200000 requests of this key"
    message = f"from and to must be dates, or {words}; there are more."
    assert (response.status_code, response.json()) == (400, error(message, param="from"))
    assert usage(booked)["total"]["requests"] == 5


def test_a_question_is_admitted_as_other_requests_are(booked: RunningEdge) -> None:
    (key, other) = booked.config["keys"]
    booked.reconfigure(keys=[{**key, "limits": {"requests_per_minute": 2}}, other])
    with booked.http() as client:
        statuses = [client.get("/usage").status_code for _ in range(3)]
        refused = client.get("/usage")
    booked.reconfigure()
    assert statuses == [200, 200, 429]
    assert refused.json()["error"]["message"] == "This key may use 2 requests per minute; they are used up."
    assert int(refused.headers["retry-after"]) > 1


def test_a_key_asks_twice_at_a_time() -> None:
    questions = Questions()
    refused = pytest.raises(LimitReached, match="may ask for its usage 2 times at a time")
    with questions.admit("a"), questions.admit("a"), questions.admit("b"), refused, questions.admit("a"):
        pass
    with questions.admit("a"), questions.admit("a"):
        pass


def test_without_a_range_it_is_this_month(booked: RunningEdge) -> None:
    with booked.http() as client:
        body = client.get("/usage").json()
    now = datetime.now(UTC)
    assert body["from"] == f"{now.year}-{now.month:02}-01T00:00:00Z"
    assert body["to"] > now.isoformat()
    assert (body["by"], body["data"], body["total"]["cost_usd"]) == ("day", [], "0")


@pytest.mark.parametrize(
    ("params", "param", "message"),
    [
        ({"by": "key"}, "by", 'by must be "day" or "model", got "key".'),
        ({"by": ""}, "by", 'by must be "day" or "model", got "".'),
        ({"from": "yesterday"}, "from", f'from {TIMES}, got "yesterday".'),
        ({"to": "2031-02-30"}, "to", f'to {TIMES}, got "2031-02-30".'),
        ({"to": "2031-01-31T12:00:00"}, "to", f'to {TIMES}, got "2031-01-31T12:00:00".'),
        ({"to": "9999-12-31"}, "to", f'to {TIMES}, got "9999-12-31".'),
        (
            {"from": "2032-01-01"},
            "from",
            "from must be before to, got 2032-01-01T00:00:00Z and 2032-01-01T00:00:00Z.",
        ),
        ({"from": "2030-01-01"}, "from", "from must be at most 366 days before to, got 730."),
    ],
)
def test_a_bad_parameter_is_refused_by_name(
    booked: RunningEdge, params: dict[str, str], param: str, message: str
) -> None:
    with booked.http() as client:
        response = client.get("/usage", params={**RANGE, **params})
    assert (response.status_code, response.json()) == (400, error(message, param=param))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.dictionaries(st.sampled_from(["from", "to", "by", "x"]), st.text(max_size=30)))
def test_any_parameters_get_an_answer_of_the_callers_kind(booked: RunningEdge, params: dict[str, str]) -> None:
    with booked.http() as client:
        assert client.get("/usage", params=params).status_code in (200, 400)


def test_it_is_there_under_both_prefixes_and_needs_a_key(booked: RunningEdge) -> None:
    root = booked.url.removesuffix("/v1")
    for prefix in PREFIXES:
        with booked.http() as client:
            assert client.get(f"{root}{prefix}/usage").status_code == 200
        with booked.http(None) as client:
            assert client.get(f"{root}{prefix}/usage").status_code == 401


def test_without_a_ledger_it_is_404_after_the_parameters(edge: RunningEdge) -> None:
    with edge.http() as client:
        response = client.get("/usage")
        assert response.status_code == 404
        assert response.json() == error("This service keeps no ledger of usage.", code="not_found")
        assert client.get("/usage", params={"by": "x"}).status_code == 400


def test_a_database_that_is_away_is_503_with_retry_after(model_folders: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "away.sqlite"
    place.mkdir()
    url = f"sqlite:///{place}"
    config = {
        **config_for(model_folders),
        "ledger": {"directory": str(tmp_path), "url": url, "write_interval_s": INTERVAL_S},
    }
    with running_edge(config, FakeConfig(vocab_size=512, context_length=CONTEXT)) as edge, edge.http() as client:
        response = client.get("/usage")
        place.rmdir()
        eventually(lambda: client.get("/usage").status_code == 200)
    assert response.status_code == 503
    message = "The usage cannot be read now; try again."
    assert response.json() == error(message, "server_error", code="ledger_unavailable")
    assert response.headers["retry-after"] == "5"
