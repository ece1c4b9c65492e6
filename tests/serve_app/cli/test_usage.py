"""`python -m serve_app usage` prints the sums of a ledger exactly, in each form, and no secret."""

import csv
import io
import json
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.cli.commands import main
from serve_app.ledger import entries
from serve_app.ledger.database import Database
from serve_app.ledger.record import microseconds
from tests.support.ledger.postgres import PASSWORD, Postgres
from tests.support.ledger.usage_records import NOON, usage_record
from tests.support.processes.demo_config import text_config

pytest_plugins = ("tests.support.ledger.ledger_fixtures",)


def fill(url: str, *records: Any) -> None:
    database = Database.of(url)
    entries.write(database, list(records))
    database.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger of two keys, two models and two days."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    later = microseconds(NOON + timedelta(days=1))
    fill(
        url,
        usage_record(key="alice", cost=1_500_000_000_001),
        usage_record(key="alice", cost=2, model="c/d"),
        usage_record(key="alice", cost=3, ended_us=later),
        usage_record(key="bob", cost=10**13, ended_us=later, slug="acme/tri", endpoint="far"),
    )
    return url


def usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["usage", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_the_table_has_aligned_columns_and_a_total(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = usage(capsys, "--url", url, "--by", "key,day")
    head, *lines = printed.splitlines()
    assert head.split() == [
        *("key", "day", "requests", "prompt_tokens", "cached_tokens", "completion_tokens"),
        *("reasoning_tokens", "image_tokens", "cost_usd"),
    ]
    assert [line.split() for line in lines] == [
        ["alice", "2031-01-31", "2", "20", "0", "10", "0", "0", "1.500000000003"],
        ["alice", "2031-02-01", "1", "10", "0", "5", "0", "0", "0.000000000003"],
        ["bob", "2031-02-01", "1", "10", "0", "5", "0", "0", "10"],
        ["total", "4", "40", "0", "20", "0", "0", "11.500000000006"],
    ]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_without_options_it_sums_by_key_model_and_day(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    groups = [line.split()[:3] for line in usage(capsys, "--url", url).splitlines()[1:-1]]
    assert groups == [
        ["alice", "a/b", "2031-01-31"],
        ["alice", "a/b", "2031-02-01"],
        ["alice", "c/d", "2031-01-31"],
        ["bob", "a/b", "2031-02-01"],
    ]


def test_json_has_exact_decimals_as_text(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(usage(capsys, "--url", url, "--by", "slug,endpoint", "--json"))
    assert [(row["slug"], row["endpoint"], row["cost_usd"]) for row in printed["rows"]] == [
        ("", "", "1.500000000006"),
        ("acme/tri", "far", "10"),
    ]
    assert printed["total"]["cost_usd"] == "11.500000000006"
    assert printed["total"]["requests"] == 4


def test_csv_can_be_read_by_a_spreadsheet(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(usage(capsys, "--url", url, "--by", "model", "--csv"))))
    assert [(row["model"], row["cost_usd"]) for row in rows] == [("a/b", "11.500000000004"), ("c/d", "0.000000000002")]


def test_a_range_and_a_key_choose(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    def requests(*options: str) -> int:
        return int(json.loads(usage(capsys, "--url", url, "--json", *options))["total"]["requests"])

    assert requests("--from", "2031-02-01") == 2
    assert requests("--to", "2031-01-31") == 2
    assert requests("--from", "2031-01-31", "--to", "2031-02-01", "--key", "alice") == 3
    assert requests("--key", "nobody") == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--by", "key,colour"], "--by must be some of key, model, day, slug, endpoint, separated by commas"),
        (["--by", "key,key"], "--by must be some of"),
        (["--by", ""], "--by must be some of"),
        (["--from", "yesterday"], "--from must be a date such as 2031-01-31, got 'yesterday'."),
        (["--from", "2031-02-01", "--to", "2031-01-31"], "--from must not be after --to"),
    ],
)
def test_wrong_options_are_refused_by_name(
    url: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["usage", "--url", url, *options]) == 2
    assert capsys.readouterr().err.startswith(message)


def config_file(folder: Path, ledger: Any) -> str:
    raw = text_config()
    raw["applications"][0]["deployments"][0]["user_config"]["ledger"] = ledger
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def test_the_ledger_is_that_of_the_configuration(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGER_URL", url)
    for ledger in ({"url": url}, {"directory": str(tmp_path)}, {"url_env": "LEDGER_URL"}):
        printed = usage(capsys, "--config", config_file(tmp_path, ledger), "--by", "key", "--json")
        assert json.loads(printed)["total"]["requests"] == 4


def test_a_file_without_a_ledger_and_a_ledger_without_a_file_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_file(tmp_path, None)
    assert main(["usage", "--config", path]) == 2
    assert capsys.readouterr().err == f"{path} has no ledger.\n"
    assert main(["usage", "--url", f"sqlite:///{tmp_path}/nothing.sqlite"]) == 2
    assert capsys.readouterr().err.startswith(f"There is no ledger at '{tmp_path}/nothing.sqlite'")
    assert not (tmp_path / "nothing.sqlite").exists()


def test_postgres_is_read_likewise_and_its_password_is_not_printed(
    postgres: Postgres, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgres.new_database("usage-command")
    fill(url, usage_record(key="alice", cost=7))
    assert json.loads(usage(capsys, "--url", url, "--json"))["total"]["cost_usd"] == "0.000000000007"
    wrong = url.replace(f":{postgres.port}/", ":1/")
    assert main(["usage", "--url", wrong]) == 1
    printed = capsys.readouterr()
    assert "Connection refused" in printed.err
    assert PASSWORD not in printed.err + printed.out


COSTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10**15)), min_size=1, max_size=20)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(COSTS)
def test_printed_sums_are_exact(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str], costs: list[tuple[str, int]]
) -> None:
    url = f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'ledger.sqlite'}"
    fill(url, *(usage_record(key=key, cost=cost) for key, cost in costs))
    printed = json.loads(usage(capsys, "--url", url, "--by", "key", "--json"))
    for row in printed["rows"]:
        expected = sum(cost for key, cost in costs if key == row["key"])
        assert Decimal(row["cost_usd"]) * 10**12 == expected
    assert Decimal(printed["total"]["cost_usd"]) * 10**12 == sum(cost for _, cost in costs)


def test_check_finds_what_a_ledger_lacks_and_leaves_no_records_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEDGER_URL", raising=False)
    for ledger, message in (
        ({"url_env": "LEDGER_URL"}, "ledger.url_env: the environment variable 'LEDGER_URL' is empty."),
        ({"url": f"mysql://u:{PASSWORD}@h/d"}, "ledger.url must be sqlite:///path or postgresql://user@host/database"),
        ({"directory": "/dev/null/x"}, "ledger.directory must be a folder that can be written"),
    ):
        main(["check", "--config", config_file(tmp_path, ledger)])
        printed = capsys.readouterr().err
        assert message in printed
        assert PASSWORD not in printed
    main(["check", "--config", config_file(tmp_path, {"directory": str(tmp_path / "fine")})])
    assert "ledger" not in capsys.readouterr().err
    assert list((tmp_path / "fine" / "spool").iterdir()) == []
