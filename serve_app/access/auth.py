"""Authentication by API keys. The service stores only their hashes.

A key is 256 random bits, so its SHA-256 cannot be searched for and needs no salt or slow hash.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from serve_app.base.errors import NotAuthenticated
from serve_app.config.keys import KeyConfig, KeyLimits, is_expired
from serve_app.config.service import LimitsConfig
from serve_app.ledger.money import to_pico
from serve_app.ledger.spend import Budget

_KEY_PREFIX = "rh-"
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """The holder of a valid key. `models` None: the whole catalogue; `owner` None: no private checkpoints.
    `reads_metrics`: those of the service.
    """

    name: str
    models: frozenset[str] | None = None
    owner: str | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    budget: Budget = field(default_factory=Budget)
    reads_metrics: bool = False


@dataclass(frozen=True, slots=True)
class _Key:
    digest: bytes
    config: KeyConfig
    caller: Caller


class Keyring:
    """The keys of one configuration."""

    def __init__(self, keys: Mapping[bytes, KeyConfig], limits: LimitsConfig) -> None:
        """`keys`: the callers by the SHA-256 of their key."""
        self._keys = {digest: _Key(digest, config, _caller(config, limits.per_key)) for digest, config in keys.items()}

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: str | None, now: datetime) -> Caller:
        """The caller behind an `Authorization` header, decoded as Latin-1. Raises `NotAuthenticated`."""
        if authorization is None:
            raise NotAuthenticated("No API key: send it as 'Authorization: Bearer <key>'.")
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise NotAuthenticated("The Authorization header must be 'Bearer <key>'.")
        digest = hashlib.sha256(secret.strip().encode("latin-1")).digest()  # the bytes that were sent
        # The table is searched by a hash that callers cannot steer, so its timing says nothing about any key.
        key = self._keys.get(digest)
        if key is None or not hmac.compare_digest(key.digest, digest):
            raise NotAuthenticated("The API key is not valid.")
        if is_expired(key.config, now):
            raise NotAuthenticated("The API key has expired.")
        return key.caller


def new_key() -> str:
    """A new key. Store only its `hash_key`."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_key(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _caller(config: KeyConfig, defaults: KeyLimits) -> Caller:
    models = None if config.models is None else frozenset(config.models)
    limits = KeyLimits(**defaults.model_dump() | config.limits.model_dump(exclude_unset=True))
    return Caller(config.name, models, config.owner, limits, _budget(limits), config.metrics)


def _budget(limits: KeyLimits) -> Budget:
    return Budget(
        None if limits.usd_per_day is None else to_pico(limits.usd_per_day),
        None if limits.usd_per_month is None else to_pico(limits.usd_per_month),
        limits.tokens_per_day,
        limits.tokens_per_month,
    )
