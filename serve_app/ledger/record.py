"""The usage of one request, as a value and as a line of JSON in a spool."""

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime, timedelta
from operator import attrgetter
from typing import Final

from serve_app.ledger.spend import Spend

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST_US: Final = (datetime(9999, 1, 1, tzinfo=UTC) - _EPOCH) // _MICROSECOND
_NOT_STORED: Final = frozenset({"is_held"})


class BrokenLine(Exception):
    """A line of a spool that holds no record: torn by a crash, or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """`id` is random, unlike `request_id`, which clients may choose. `ended_us`: microseconds since 1970, UTC. `api`:
    `chat` or `completions`. `model` is a base id, or a remote endpoint's own name for its model. `digest` is the
    checkpoint's. Prices and `cost` are in 10^-12 USD, prices per token; None where nothing is charged. `is_held`: its
    key's budget holds an amount for it, which ends with the record.
    """

    id: str
    ended_us: int
    request_id: str
    key: str
    api: str
    slug: str = ""
    endpoint: str = ""
    model: str = ""
    checkpoint: str = ""
    digest: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    image_tokens: int = 0
    prompt_price: int | None = None
    cached_price: int | None = None
    completion_price: int | None = None
    cost: int = 0
    is_estimated: bool = False
    is_streamed: bool = False
    first_token_s: float | None = None
    total_s: float = 0.0
    status: int = 0
    outcome: str = ""
    error_code: str = ""
    finish_reason: str = ""
    is_held: bool = False

    @property
    def ended_at(self) -> datetime:
        return _EPOCH + self.ended_us * _MICROSECOND

    @property
    def day(self) -> date:
        """The UTC day that the request counts for."""
        return self.ended_at.date()

    @property
    def spend(self) -> Spend:
        return Spend(self.cost, self.prompt_tokens + self.completion_tokens)

    def line(self) -> bytes:
        """With its line break. `parse_line` reads it."""
        return _encode(dict(zip(_KINDS, _values(self), strict=True))).encode() + b"\n"

    def row(self) -> dict[str, object]:
        """The columns of the database."""
        columns = {name: value for name, value in asdict(self).items() if name not in _NOT_STORED}
        del columns["ended_us"]
        return {**columns, "ended_at": self.ended_at, "day": self.day}


def microseconds(time: datetime) -> int:
    """Since 1970, UTC."""
    return (time - _EPOCH) // _MICROSECOND


def parse_line(line: bytes) -> UsageRecord:
    """Unknown fields are those of a newer version, and are left out. Raises `BrokenLine`."""
    try:
        raw = json.loads(line)
        record = UsageRecord(**{name: value for name, value in raw.items() if name in _KINDS})
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise BrokenLine(f"A line of {len(line)} bytes holds no record.") from exc
    for name, kinds in _KINDS.items():
        if type(getattr(record, name)) not in kinds:
            raise BrokenLine(f"{name} is of another type.")
    if not 0 <= record.ended_us < _LAST_US:
        raise BrokenLine("ended_us is no time.")
    return record


_OF_HINT: Final[dict[object, tuple[type, ...]]] = {
    str: (str,),
    int: (int,),
    bool: (bool,),
    float: (float, int),
    int | None: (int, type(None)),
    float | None: (float, int, type(None)),
}
_KINDS: Final = {field.name: _OF_HINT[field.type] for field in fields(UsageRecord)}
"""The types that each field may have. A `bool` is no integer here."""

_values: Final = attrgetter(*_KINDS)
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
