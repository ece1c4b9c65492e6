"""Keys."""

import hashlib
from datetime import UTC, datetime

import pytest

from serve_app.access.auth import Keyring, hash_key, new_key
from serve_app.base.errors import NotAuthenticated
from serve_app.config.keys import KeyConfig, KeyLimits, PerKeyLimits
from serve_app.config.service import LimitsConfig

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def ring(**fields: object) -> Keyring:
    digest = hashlib.sha256(b"secret")
    config = {"name": "ci", "sha256": digest.hexdigest(), **fields}
    return Keyring({digest.digest(): KeyConfig.model_validate(config)}, LimitsConfig())


def test_a_valid_key_is_its_caller() -> None:
    caller = ring(models=["a"], owner="alice").authenticate("Bearer secret", NOW)
    assert (caller.name, caller.models, caller.owner) == ("ci", frozenset({"a"}), "alice")


@pytest.mark.parametrize("header", ["bearer secret", "BEARER  secret ", "Bearer secret"])
def test_the_scheme_is_read_leniently(header: str) -> None:
    assert ring().authenticate(header, NOW).name == "ci"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "No API key: send it as 'Authorization: Bearer <key>'."),
        ("", "The Authorization header must be 'Bearer <key>'."),
        ("Bearer", "The Authorization header must be 'Bearer <key>'."),
        ("Basic secret", "The Authorization header must be 'Bearer <key>'."),
        ("Bearer Secret", "The API key is not valid."),
        ("Bearer s\xe9cret", "The API key is not valid."),
    ],
)
def test_everything_else_is_not_authenticated(header: str | None, message: str) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        ring().authenticate(header, NOW)
    assert str(caught.value) == message


def test_an_expired_key_is_not_authenticated() -> None:
    with pytest.raises(NotAuthenticated, match=r"^The API key has expired\.$"):
        ring(expires_at="2029-12-31T23:59:59Z").authenticate("Bearer secret", NOW)


def test_a_key_has_the_general_limits_but_for_its_own() -> None:
    general = LimitsConfig(per_key=PerKeyLimits(concurrency=5, bytes_in_flight=None, requests_per_minute=10))
    own = KeyConfig(name="k", sha256=hash_key("x").hex(), limits=KeyLimits(requests_per_minute=99))
    caller = Keyring({hash_key("x"): own}, general).authenticate("Bearer x", NOW)
    assert caller.limits == KeyLimits(concurrency=5, requests_per_minute=99)


def test_new_keys_have_256_random_bits() -> None:
    first, second = new_key(), new_key()
    assert first != second
    assert len(first.removeprefix("rh-")) == 43
