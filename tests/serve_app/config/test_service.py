"""The configuration of the service: what is refused, and how it says so."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serve_app.base.errors import ConfigRefused
from serve_app.config.keys import DEMO_KEY, KeyConfig, is_expired, key_digest
from serve_app.config.service import parse_config

MODEL = {"id": "a/b", "app": "a", "source": "/models/a"}
SHA = "0" * 64
SECRET = "rh-a-key-of-some-length"


def refusal(raw: object) -> str:
    with pytest.raises(ConfigRefused) as caught:
        parse_config(raw)
    return str(caught.value)


def with_model(**changes: Any) -> dict[str, Any]:
    return {"models": [{**MODEL, **changes}]}


def with_key(**fields: Any) -> dict[str, Any]:
    return {"models": [MODEL], "keys": [{"name": "k", **fields}]}


def with_limits(**fields: Any) -> dict[str, Any]:
    return {"models": [MODEL], "limits": fields}


def test_a_minimal_configuration_has_the_documented_defaults() -> None:
    config = parse_config({"models": [MODEL]})
    assert config.keys == ()
    assert config.checkpoints.roots == ()
    assert config.limits.body_bytes == 8 * 2**20
    assert config.limits.per_key.concurrency == 256
    assert config.models[0].renderer is None


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (None, "The configuration must be an object, got null."),
        ({}, "models is required."),
        ({"models": []}, "models must not be empty."),
        ({"models": [MODEL], "modles": 1}, "modles is not a known key. Did you mean 'models'?"),
        (with_model(variant={"v": 1}), "models[0].variant is not a known key. Did you mean 'variants'?"),
        (with_limits(stop_length=7), "limits.stop_length is now called stop_characters."),
        (
            {"models": [MODEL], "checkpoints": {"zzz": 1}},
            "checkpoints.zzz is not a known key; the keys here are roots, cache_directory, cache_bytes.",
        ),
        (with_limits(body_timeout_s="30"), 'limits.body_timeout_s must be a number, got "30".'),
        (with_limits(body_timeout_s=True), "limits.body_timeout_s must be a number, got true."),
        (with_model(sauce=1), "models[0].sauce is not a known key. Did you mean 'source'?"),
        (with_model(id="a:b"), 'models[0].id must be a name without ":", ";", "/ep/" or spaces, got "a:b".'),
        (with_model(id="a/ep/b"), 'models[0].id must be a name without ":", ";", "/ep/" or spaces, got "a/ep/b".'),
        (with_model(context_length=0), "models[0].context_length must be at least 1, got 0."),
        (with_model(context_length=True), "models[0].context_length must be an integer, got true."),
        (
            with_model(variants={"x;y": 1}),
            'models[0].variants.x;y must be a name without ";", "/ep/" or spaces, got "x;y".',
        ),
        ({"models": [MODEL, MODEL]}, 'models[1].id must be unique, got "a/b".'),
        (with_key(), "keys[0] must have exactly one of sha256, env and file, got a list of 0."),
        (with_key(sha256=SHA, env="A"), "keys[0] must have exactly one of sha256, env and file, got a list of 2."),
        (with_key(env="A", models=["x"]), 'keys[0].models[0] must be the id of a model or slug, got "x".'),
        (with_key(env="A", expires_at="2031-01-01"), 'keys[0].expires_at must have timezone info, got "2031-01-01".'),
        (with_limits(body_timeout_s=float("nan")), "limits.body_timeout_s must be a finite number, got NaN."),
        (with_limits(per_key={"concurrency": -1}), "limits.per_key.concurrency must be at least 1, got -1."),
    ],
)
def test_a_bad_configuration_is_refused_with_one_sentence(raw: object, sentence: str) -> None:
    assert refusal(raw) == sentence


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([{"name": "k", "sha256": "rh-secret"}], "keys[0].sha256 must match ^[0-9a-fA-F]{64}$, got"),
        ([{"name": "k", "env": "rh-secret"}], "keys[0].env must match ^[A-Za-z_][A-Za-z0-9_]*$, got"),
        (
            [{"name": "k", "key": "rh-secret"}],
            "keys[0].key is not a known key; the keys here are "
            "name, sha256, env, file, models, owner, expires_at, metrics, limits.",
        ),
        (["rh-secret"], "keys[0] must be an object, got"),
        ("rh-secret", "keys must be a list, got"),
    ],
)
def test_a_key_put_where_it_does_not_belong_is_not_repeated(keys: object, sentence: str) -> None:
    said = refusal({"models": [MODEL], "keys": keys})
    assert said.removesuffix(" a string of 9 characters.") == sentence


def test_a_limit_for_all_keys_leaves_the_others_as_they_are() -> None:
    limits = parse_config(with_limits(per_key={"tokens_per_minute": 9})).limits.per_key
    assert (limits.concurrency, limits.tokens_per_minute) == (256, 9)
    assert parse_config(with_limits(per_key={"concurrency": None})).limits.per_key.concurrency is None


def test_two_keys_of_one_name_are_refused() -> None:
    key = {"name": "k", "sha256": SHA}
    assert refusal({"models": [MODEL], "keys": [key, key]}) == 'keys[1].name must be unique, got "k".'


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", f"{SECRET}\n")
    assert key_digest(KeyConfig(name="k", env="TEST_API_KEY")) == hashlib.sha256(SECRET.encode()).digest()


def test_a_key_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{SECRET}\n")
    assert key_digest(KeyConfig(name="k", file=str(tmp_path / "key"))) == hashlib.sha256(SECRET.encode()).digest()


@pytest.mark.parametrize("length", [1, 15])
def test_a_key_that_is_too_short_is_refused(length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_API_KEY", "x" * length)
    (tmp_path / "key").write_text("x" * length)
    for key in (KeyConfig(name="k", env="TEST_API_KEY"), KeyConfig(name="k", file=str(tmp_path / "key"))):
        with pytest.raises(
            ConfigRefused, match=rf"^The key 'k' in .* must have at least 16 characters, got {length}\.$"
        ):
            key_digest(key)


@pytest.mark.parametrize("secret", ["x" * 16, DEMO_KEY])
def test_a_key_of_16_characters_is_long_enough_and_so_is_the_demos(secret: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("TEST_API_KEY", secret)
    assert key_digest(KeyConfig(name="k", env="TEST_API_KEY")) == hashlib.sha256(secret.encode()).digest()


def test_a_key_that_cannot_be_read_names_itself_and_its_place(tmp_path: Path) -> None:
    place = str(tmp_path / "none")
    with pytest.raises(ConfigRefused, match=f"^The key 'k' cannot be read from the file '{place}'.$"):
        key_digest(KeyConfig(name="k", file=place))


def test_an_unset_environment_variable_is_an_empty_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_API_KEY", raising=False)
    with pytest.raises(ConfigRefused, match=r"^The key 'k' is empty in the environment variable 'TEST_API_KEY'\.$"):
        key_digest(KeyConfig(name="k", env="TEST_API_KEY"))


def test_a_key_expires_at_its_moment() -> None:
    moment = datetime(2031, 1, 1, tzinfo=UTC)
    key = KeyConfig(name="k", sha256=SHA, expires_at=moment)
    assert is_expired(key, moment)
    assert not is_expired(key, datetime(2030, 12, 31, tzinfo=UTC))
