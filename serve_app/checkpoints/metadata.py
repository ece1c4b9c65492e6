"""A checkpoint's metadata: `checkpoint.json`, and the base model in `adapter_config.json`.

    {"base_model": "Qwen/Qwen3-8B", "owner": "alice", "public": false, "expires_at": "2031-01-01T00:00:00Z",
     "sha256": {"adapter_model.safetensors": "…"}}

Every field may be missing or null; unknown fields are ignored. Write this file before the weights, because it names
their owner.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

METADATA_FILE: Final = "checkpoint.json"
_MAX_NAME_CHARACTERS: Final = 1024


class NotJson(ValueError):
    """The text is not a complete JSON object. The message is a predicate."""


class BadField(ValueError):
    """A field has a value that is not allowed. The message is a sentence without the file's name."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """`sha256`: hex digits in lower case by file name."""

    base_model: str | None = None
    owner: str | None = None
    public: bool = False
    expires_at: datetime | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)


def parse_metadata(text: bytes) -> Metadata:
    """Raises `NotJson` or `BadField`."""
    raw = json_object(text)
    public = raw.get("public")
    if not isinstance(public, bool | None):
        raise BadField(f"public must be true or false, not {public!r:.60}.")
    return Metadata(
        _name(raw, "base_model"), _name(raw, "owner"), bool(public), _expiry(raw.get("expires_at")), _digests(raw)
    )


def base_of(config: Mapping[str, object]) -> str | None:
    """The base model in the adapter's configuration, if it names one."""
    base = config.get("base_model_name_or_path")
    return base if isinstance(base, str) and 0 < len(base) <= _MAX_NAME_CHARACTERS else None


def json_object(text: bytes) -> Mapping[str, object]:
    """Raises `NotJson`."""
    try:
        raw = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise NotJson("is not JSON") from exc
    if not isinstance(raw, dict):
        raise NotJson("is not a JSON object")
    return raw


def _name(raw: Mapping[str, object], name: str) -> str | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME_CHARACTERS:
        raise BadField(f"{name} must be a string of 1 to {_MAX_NAME_CHARACTERS} characters, not {value!r:.60}.")
    return value


def _expiry(value: object) -> datetime | None:
    """ISO 8601 with a time zone, or seconds since 1970."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            if moment.tzinfo is not None:
                return moment.astimezone(UTC)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    raise BadField(f"expires_at must be a date with a time zone or seconds since 1970, not {value!r:.60}.")


def _digests(raw: Mapping[str, object]) -> Mapping[str, str]:
    value = raw.get("sha256")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadField(f"sha256 must be an object, not {value!r:.60}.")
    for name, digest in value.items():
        if not isinstance(digest, str) or len(digest) != 64 or not set(digest.lower()) <= set("0123456789abcdef"):
            raise BadField(f"sha256[{name!r:.60}] must be 64 hex digits, not {digest!r:.80}.")
    return {name: digest.lower() for name, digest in value.items()}
