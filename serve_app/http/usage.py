"""`GET /v1/usage`: what the caller's key has used."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from urllib.parse import parse_qs

from serve_app.base.errors import InvalidRequest, LimitReached, NotFound
from serve_app.base.explain import show
from serve_app.http.exchange import Exchange
from serve_app.ledger.ledger import MOST_ROWS, Ledger
from serve_app.ledger.sums import Amounts, GroupBy, Range, Row, TooManyRows, total

MAX_DAYS: Final = 366
_AT_ONCE: Final = 2
_RETRY_S: Final = 1.0  # another question may be answered at any time
_TIME: Final = "a date such as 2031-01-31, or a time with its zone such as 2031-01-31T12:00:00Z"
_GROUPS: Final[Mapping[str, tuple[GroupBy, ...]]] = {"day": ("day",), "model": ("slug", "model")}
"""Of a slug, callers see its name and not which model ran behind it."""


class Questions:
    """Bounds the questions of each key at a time: the threads that read are shared by all keys."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: str) -> Iterator[None]:
        """Raises `LimitReached`; then nothing was counted."""
        if self._running[key] >= _AT_ONCE:
            raise LimitReached(f"This key may ask for its usage {_AT_ONCE} times at a time; it does so now.", _RETRY_S)
        self._running[key] += 1
        try:
            yield
        finally:
            self._running[key] -= 1


async def send_usage(exchange: Exchange, ledger: Ledger | None) -> None:
    """Raises `InvalidRequest` that names the parameter, `NotFound` without a ledger, or `LedgerUnavailable`."""
    asked = parse_qs(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    by = asked.get("by", ["day"])[0]
    if by not in _GROUPS:
        raise InvalidRequest(f'by must be "day" or "model", got {show(by)}.', "by")
    within = _range(asked, datetime.now(UTC))
    if ledger is None:
        raise NotFound("This service keeps no ledger of usage.")
    try:
        rows = await ledger.sum_up(_GROUPS[by], within, exchange.caller.name)
    except TooManyRows as exc:
        words = f"the days that they cut must have at most {MOST_ROWS} requests of this key"
        raise InvalidRequest(f"from and to must be dates, or {words}; there are more.", "from") from exc
    assert within.start is not None
    assert within.end is not None
    body = {
        "object": "list",
        "from": _shown(within.start),
        "to": _shown(within.end),
        "by": by,
        "data": [{"object": "usage", by: name, **amounts.shown()} for name, amounts in _named(rows)],
        "total": total(rows).shown(),
    }
    await exchange.send_json(200, body)


def _named(rows: Sequence[Row]) -> list[tuple[str | None, Amounts]]:
    """By the first name of each group that is not empty; None for requests that no model took."""
    found: dict[str, Amounts] = {}
    for row in rows:
        name = next(filter(None, row.group), "")
        found[name] = found.get(name, Amounts()) + row.amounts
    return [(name or None, found[name]) for name in sorted(found)]


def _range(asked: Mapping[str, Sequence[str]], now: datetime) -> Range:
    """Unset: from the first of this month, and to the end of today."""
    midnight = datetime.combine(now.date(), time(), UTC)
    start = _time("from", asked["from"][0], 0) if "from" in asked else midnight.replace(day=1)
    end = _time("to", asked["to"][0], 1) if "to" in asked else midnight + timedelta(days=1)
    if start >= end:
        raise InvalidRequest(f"from must be before to, got {_shown(start)} and {_shown(end)}.", "from")
    if end - start > timedelta(days=MAX_DAYS):
        raise InvalidRequest(f"from must be at most {MAX_DAYS} days before to, got {(end - start).days}.", "from")
    return Range(start, end)


def _time(name: str, value: str, days: int) -> datetime:
    """`days`: added to a date. A date as `to` includes that day."""
    try:
        if len(value) == len("2031-01-31"):
            return datetime.combine(date.fromisoformat(value), time(), UTC) + timedelta(days=days)
        found = datetime.fromisoformat(value)
        if found.tzinfo is not None and "T" in value.upper():
            return found.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise InvalidRequest(f"{name} must be {_TIME}, got {show(value)}.", name)


def _shown(time_: datetime) -> str:
    return time_.isoformat().replace("+00:00", "Z")
