"""The ledger in the configuration: what is accepted, what is refused by name, and that no password is printed."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from serve_app.access.auth import Keyring
from serve_app.base.errors import ConfigRefused
from serve_app.config.keys import BUDGETS, KeyConfig, key_digest
from serve_app.config.ledger import LedgerConfig
from serve_app.config.paths import project_root
from serve_app.config.service import LimitsConfig, ServiceConfig, parse_config, read_config
from serve_app.ledger.spend import Budget

SECRET = "not-to-be-shown"
MODELS = [{"id": "a/b", "app": "a", "source": "/models/a"}]
KEY = {"name": "k", "sha256": "0" * 64}


def parse(**sections: Any) -> ServiceConfig:
    return parse_config({"models": MODELS, "keys": [KEY], **sections})


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigRefused) as found:
        parse(**sections)
    return str(found.value)


def test_without_the_section_there_is_no_ledger() -> None:
    assert parse().ledger is None
    assert parse(ledger=None).ledger is None
    assert parse(ledger={}).ledger == LedgerConfig()


def test_the_default_is_a_sqlite_file_beside_the_records_that_wait() -> None:
    folder = Path.home() / ".local/share/roundhouse/ledger"
    assert LedgerConfig().folder == folder
    assert LedgerConfig().database_url() == f"sqlite:///{folder}/ledger.sqlite"
    assert LedgerConfig(directory="/data").database_url() == "sqlite:////data/ledger.sqlite"
    assert LedgerConfig(directory="./.cache/ledger").folder == (project_root() or Path()) / ".cache/ledger"


def test_a_relative_sqlite_file_starts_at_the_project_root() -> None:
    assert LedgerConfig(url="sqlite:///x/y.sqlite").database_url() == f"sqlite:///{project_root()}/x/y.sqlite"
    assert LedgerConfig(url="sqlite:////x/y.sqlite").database_url() == "sqlite:////x/y.sqlite"
    assert LedgerConfig(url="postgresql://h/d").database_url() == "postgresql://h/d"


def test_the_url_may_be_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LedgerConfig(url_env="LEDGER_URL")
    with pytest.raises(ConfigRefused, match=r"^ledger.url_env: the environment variable 'LEDGER_URL' is empty\.$"):
        config.database_url()
    monkeypatch.setenv("LEDGER_URL", " postgresql://u:p@h/d\n")
    assert config.database_url() == "postgresql://u:p@h/d"
    assert config.database_url({"LEDGER_URL": "sqlite:////x"}) == "sqlite:////x"


@pytest.mark.parametrize(
    ("ledger", "message"),
    [
        ({"url": "sqlite:////x", "url_env": "X"}, "ledger must have at most one of url and url_env, got a list of 2."),
        ({"urls": "x"}, "ledger.urls is not a known key. Did you mean 'url'?"),
        ({"url": 7}, "ledger.url must be a string, got 7."),
        ({"url_env": "A B"}, 'ledger.url_env must match ^[A-Za-z_][A-Za-z0-9_]*$, got "A B".'),
        ("sqlite:////x", 'ledger must be an object, got "sqlite:////x".'),
    ],
)
def test_what_is_wrong_is_refused_by_name(ledger: Any, message: str) -> None:
    assert refused(ledger=ledger) == message


@pytest.mark.parametrize("ledger", [{"url": [SECRET]}, {"url": f"x://u:{SECRET}@h", "url_env": "X"}, {"url": ""}])
def test_no_refusal_repeats_a_url(ledger: Any) -> None:
    assert SECRET not in refused(ledger=ledger)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_without_a_ledger_is_refused_by_name(name: str) -> None:
    key = {**KEY, "limits": {name: 5}}
    assert refused(keys=[key]) == f"keys[0].limits.{name} needs a ledger."
    assert refused(limits={"per_key": {name: 5}}) == f"limits.per_key.{name} needs a ledger."
    parse(keys=[key], ledger={})
    parse(limits={"per_key": {name: 5}}, ledger={})


def test_a_key_whose_budget_nobody_counts_lets_nobody_in_and_others_stay() -> None:
    keys = [KEY, {**KEY, "name": "rich", "limits": {"usd_per_day": 1}}]
    reading = read_config({"models": MODELS, "keys": keys, "ledger": {"url": 7}})
    assert [key.name for key in reading.config.keys] == ["k"]
    assert [str(refusal) for refusal in reading.refusals] == [
        "ledger.url must be a string, got 7.",
        "keys[1].limits.usd_per_day needs a ledger.",
    ]
    assert [refusal.section for refusal in reading.refusals] == ["ledger", "keys"]


def test_a_wrong_ledger_keeps_the_one_before_and_its_budgets() -> None:
    keys = [{**KEY, "limits": {"usd_per_day": 1}}]
    before = read_config({"models": MODELS, "keys": keys, "ledger": {}}).config
    after = read_config({"models": MODELS, "keys": keys, "ledger": {"url": 7}}, before)
    assert after.config.ledger == LedgerConfig()
    assert [key.name for key in after.config.keys] == ["k"]


def test_keys_that_stay_because_the_new_ones_are_no_list_stay_without_budgets_that_nobody_counts() -> None:
    keys = [KEY, {**KEY, "name": "rich", "limits": {"usd_per_day": 1}}]
    before = read_config({"models": MODELS, "keys": keys, "ledger": {}}).config
    assert [key.name for key in read_config({"models": MODELS, "keys": 7}, before).config.keys] == ["k"]


def test_limits_of_all_keys_that_nobody_counts_keep_their_values_before() -> None:
    before = read_config({"models": MODELS, "limits": {"messages": 7}}).config
    after = read_config({"models": MODELS, "limits": {"messages": 8, "per_key": {"usd_per_day": 1}}}, before).config
    assert after.limits.messages == 7
    with_budget = read_config({"models": MODELS, "limits": {"per_key": {"usd_per_day": 1}}, "ledger": {}}).config
    gone = read_config({"models": MODELS, "limits": {"per_key": {"usd_per_day": 1}}}, with_budget).config
    assert gone.limits == LimitsConfig()


@pytest.mark.parametrize("amount", [0, -1, "1.0000001", 1_000_001, True, "x"])
def test_an_amount_of_money_has_its_bounds(amount: object) -> None:
    message = refused(keys=[{**KEY, "limits": {"usd_per_month": amount}}], ledger={})
    assert message.startswith("keys[0].limits.usd_per_month must be ")


def test_a_key_has_its_own_limits_before_those_of_all() -> None:
    per_key = {"usd_per_day": "0.25", "tokens_per_month": 7}
    limits = LimitsConfig.model_validate({"per_key": per_key})
    keys = [
        KeyConfig.model_validate({**KEY, "limits": own}) for own in ({}, {"usd_per_day": 3, "tokens_per_month": None})
    ]
    found = []
    for key in keys:
        keyring = Keyring({key_digest(key): key}, limits)
        found += [entry.caller.budget for entry in keyring._keys.values()]
    assert found == [Budget(cost_per_day=250_000_000_000, tokens_per_month=7), Budget(cost_per_day=3 * 10**12)]
    assert keys[1].limits.usd_per_day == Decimal(3)
