"""Sums of usage by key, model and day."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any, Final, Literal, get_args

from sqlalchemy import ColumnElement, Select, func, select

from serve_app.ledger.database import Database
from serve_app.ledger.money import spelled
from serve_app.ledger.schema import AMOUNTS, COUNTED, DAILY, USAGE

GroupBy = Literal["key", "model", "day", "slug", "endpoint"]
GROUPINGS: Final[tuple[GroupBy, ...]] = get_args(GroupBy)


@dataclass(frozen=True, slots=True)
class Range:
    """Of the UTC times at which requests ended, from `start` and before `end`; None is no bound."""

    start: datetime | None = None
    end: datetime | None = None

    @property
    def is_of_days(self) -> bool:
        """Whether it holds whole days only."""
        return all(bound is None or bound.time() == time() for bound in (self.start, self.end))


@dataclass(frozen=True, slots=True)
class Amounts:
    """`cost` in 10^-12 USD. The names are those of the columns."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    image_tokens: int = 0
    cost: int = 0

    def __add__(self, other: "Amounts") -> "Amounts":
        return Amounts(*(getattr(self, name) + getattr(other, name) for name in AMOUNTS))

    def shown(self) -> dict[str, int | str]:
        """For people and programs: the cost is a decimal of USD, as text."""
        counts: dict[str, int | str] = {name: getattr(self, name) for name in AMOUNTS if name != "cost"}
        return {**counts, "cost_usd": spelled(self.cost)}


@dataclass(frozen=True, slots=True)
class Row:
    """The sum of one group. `group`: its values in the order that was asked for; a day is written `2031-01-31`."""

    group: tuple[str, ...]
    amounts: Amounts


def sum_up(database: Database, by: Sequence[GroupBy], within: Range, key: str | None = None) -> list[Row]:
    """In the order of the groups. `key` None: of all keys. Raises `LedgerUnavailable`."""
    query = _of_days(by, within, key) if within.is_of_days else _of_times(by, within, key)
    with database.read() as connection:
        found = connection.execute(query).all()
    rows = [Row(tuple(map(str, row[: len(by)])), Amounts(*map(int, row[len(by) :]))) for row in found]
    return sorted((row for row in rows if row.amounts.requests), key=lambda row: row.group)


def total(rows: Sequence[Row]) -> Amounts:
    return sum((row.amounts for row in rows), Amounts())


def _of_days(by: Sequence[GroupBy], within: Range, key: str | None) -> Select[Any]:
    """Read the sums of days."""
    groups = [DAILY.c[name] for name in by]
    bounds = [None if bound is None else bound.date() for bound in (within.start, within.end)]
    conditions = _between(DAILY.c.day, *bounds)
    return _summed(groups, [DAILY.c[name] for name in AMOUNTS]).where(*conditions, *_of_key(DAILY.c.key, key))


def _of_times(by: Sequence[GroupBy], within: Range, key: str | None) -> Select[Any]:
    """Read each request."""
    groups = [USAGE.c[name] for name in by]
    conditions = _between(USAGE.c.ended_at, within.start, within.end)
    counted = [USAGE.c[name] for name in COUNTED]
    return _summed(groups, counted, func.count()).where(*conditions, *_of_key(USAGE.c.key, key))


def _summed(groups: Sequence[ColumnElement[Any]], amounts: Sequence[ColumnElement[int]], *first: Any) -> Select[Any]:
    return select(*groups, *first, *(func.coalesce(func.sum(amount), 0) for amount in amounts)).group_by(*groups)


def _between(
    column: ColumnElement[Any], start: date | datetime | None, end: date | datetime | None
) -> Iterator[ColumnElement[bool]]:
    if start is not None:
        yield column >= start
    if end is not None:
        yield column < end


def _of_key(column: ColumnElement[Any], key: str | None) -> Iterator[ColumnElement[bool]]:
    if key is not None:
        yield column == key
