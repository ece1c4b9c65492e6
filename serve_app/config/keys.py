"""API keys in the configuration: the caller's name, what the key may use, and where it is read from."""

import hashlib
import os
import re
from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Final, Self

from pydantic import AwareDatetime, Field, StringConstraints, model_validator
from typing_extensions import Doc

from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import Complaint
from serve_app.config.checking.section import Bytes, Count, Section, Text
from serve_app.config.price import BudgetTokens, BudgetUsd

DEMO_KEY: Final = "roundhouse-demo"
MIN_KEY_CHARACTERS: Final = 16
BUDGETS: Final = ("usd_per_day", "usd_per_month", "tokens_per_day", "tokens_per_month")
"""The limits that are counted in the ledger."""
_MAX_FILE_BYTES: Final = 1 << 16
_MIN_UPSTREAM_KEY_CHARACTERS: Final = 8
_MAX_UPSTREAM_KEY_CHARACTERS: Final = 4096
_UPSTREAM_KEY: Final = re.compile(rf"[!-~]{{{_MIN_UPSTREAM_KEY_CHARACTERS},{_MAX_UPSTREAM_KEY_CHARACTERS}}}")

HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class KeyLimits(Section):
    """The limits of one key; None is no limit. An unset limit takes its value from `limits.per_key`."""

    concurrency: Annotated[Count | None, Doc("Requests at the same time; null: no limit.")] = None
    bytes_in_flight: Annotated[
        Bytes | None, Doc("Memory that its requests under way in an ingress may hold; null: no limit.")
    ] = None
    requests_per_minute: Annotated[Count | None, Doc("Requests per minute; null: no limit.")] = None
    tokens_per_minute: Annotated[
        Count | None, Doc("Prompt and completion tokens per minute, reserved when a request begins; null: no limit.")
    ] = None
    usd_per_day: Annotated[
        BudgetUsd | None, Doc("USD per UTC day, over all ingresses; needs `ledger`; null: no limit.")
    ] = None
    usd_per_month: Annotated[BudgetUsd | None, Doc("USD per UTC month, likewise; null: no limit.")] = None
    tokens_per_day: Annotated[
        BudgetTokens | None, Doc("Prompt and completion tokens per UTC day, likewise; null: no limit.")
    ] = None
    tokens_per_month: Annotated[
        BudgetTokens | None, Doc("Prompt and completion tokens per UTC month, likewise; null: no limit.")
    ] = None


class PerKeyLimits(KeyLimits):
    """The limits of each key that has no limits of its own."""

    concurrency: Annotated[Count | None, Doc("Requests at the same time; null: no limit.")] = 256
    bytes_in_flight: Annotated[
        Bytes | None, Doc("Memory that the requests under way of a key may hold in an ingress; null: no limit.")
    ] = 64 * 2**20


class KeyConfig(Section):
    """One caller. The configuration never contains the key, only its hash or the place to read it from."""

    name: Annotated[Text, Doc("Name of the caller in logs and metrics; no two keys may have the same.")]
    sha256: Annotated[
        HexDigest | None, Doc("SHA-256 of the key, in hex. Give exactly one of `sha256`, `env` and `file`.")
    ] = None
    env: Annotated[VariableName | None, Doc("Environment variable of the ingress that holds the key.")] = None
    file: Annotated[Text | None, Doc("File that holds the key.")] = None
    models: Annotated[
        tuple[Text, ...] | None,
        Field(strict=False),
        Doc("Ids of the base models that the key may use, with their checkpoints; null: all."),
    ] = None
    owner: Annotated[Text | None, Doc("Owner whose private checkpoints the key may use; null: none.")] = None
    expires_at: Annotated[
        AwareDatetime | None,
        Field(strict=False),
        Doc("Time at which the key expires, such as `2031-01-01T00:00:00Z`; null: never."),
    ] = None
    metrics: Annotated[bool, Doc("Whether the key may read `GET /metrics`, which shows all keys' use.")] = False
    limits: Annotated[KeyLimits, Doc("Replaces values of `limits.per_key`; the others stay.")] = KeyLimits()

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("sha256", "env", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise Complaint("must have exactly one of sha256, env and file", given)
        return self


def key_digest(key: KeyConfig, more_variables: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """SHA-256 of the key, read from the place in its configuration. `more_variables`: variables that the ingress has
    and this process lacks. Raises `ConfigRefused`.
    """
    if key.sha256 is not None:
        return bytes.fromhex(key.sha256)
    what = f"The key {key.name!r}"
    secret = _secret(what, key.env, key.file, more_variables)
    if len(secret) < MIN_KEY_CHARACTERS and secret != DEMO_KEY:
        least = f"must have at least {MIN_KEY_CHARACTERS} characters, got {len(secret)}"
        raise ConfigRefused(f"{what} in {_place(key.env, key.file)} {least}.")
    return hashlib.sha256(secret.encode()).digest()


def upstream_key(
    what: str, env: str | None, file: str | None, more_variables: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The key of an upstream, from exactly one of the two places; `what` begins the sentence of an error. A key of few
    characters could not be told from other text where it must be hidden. Raises `ConfigRefused`.
    """
    secret = _secret(what, env, file, more_variables)
    if not _UPSTREAM_KEY.fullmatch(secret):
        limits = (
            f"must have {_MIN_UPSTREAM_KEY_CHARACTERS} to {_MAX_UPSTREAM_KEY_CHARACTERS} printable ASCII characters"
        )
        raise ConfigRefused(f"{what} in {_place(env, file)} {limits}, got {len(secret)} characters.")
    return secret


def is_expired(key: KeyConfig, now: datetime) -> bool:
    return key.expires_at is not None and now >= key.expires_at


def _secret(what: str, env: str | None, file: str | None, more_variables: Mapping[str, str]) -> str:
    place = _place(env, file)
    if env is not None:
        secret = {**os.environ, **more_variables}.get(env, "").strip()  # noqa: TID251 - where the rule sends all to
    else:
        assert file is not None
        try:
            secret = _read(file)
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigRefused(f"{what} cannot be read from {place}.") from exc
    if not secret:
        raise ConfigRefused(f"{what} is empty in {place}.")
    return secret


def _place(env: str | None, file: str | None) -> str:
    return f"the environment variable {env!r}" if env is not None else f"the file {file!r}"


def _read(file: str) -> str:
    with open(file, "rb") as stream:
        return stream.read(_MAX_FILE_BYTES).decode("utf-8").strip()
