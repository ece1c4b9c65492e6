"""Sums of usage by key, model and day.

Whole days are read from their sums. Of a range of times, only the days that it cuts are read request by request.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, Literal, get_args

from sqlalchemy import ColumnElement, Connection, Select, func, select

from serve_app.ledger.database import Database
from serve_app.ledger.money import spelled
from serve_app.ledger.schema import AMOUNTS, COUNTED, DAILY, USAGE

GroupBy = Literal["key", "model", "day", "slug", "endpoint"]
GROUPINGS: Final[tuple[GroupBy, ...]] = get_args(GroupBy)


class TooManyRows(Exception):
    """The days that a range cuts have more requests than may be read."""


@dataclass(frozen=True, slots=True)
class Range:
    """Of the UTC times at which requests ended, from `start` and before `end`; None is no bound."""

    start: datetime | None = None
    end: datetime | None = None

    def parts(self) -> "tuple[Range | None, list[Range]]":
        """The whole days in it, None for none, and the parts of days before and after them."""
        first = None if self.start is None else _midnight_from(self.start)
        last = None if self.end is None else datetime.combine(self.end.astimezone(UTC).date(), time(), UTC)
        if first is not None and last is not None and first > last:
            return None, [self]
        cut = [part for part in (Range(self.start, first), Range(last, self.end)) if part.start != part.end]
        return None if first is not None and first == last else Range(first, last), cut


def _midnight_from(moment: datetime) -> datetime:
    """Its own one, or the next."""
    midnight = datetime.combine(moment.astimezone(UTC).date(), time(), UTC)
    return midnight if midnight == moment else midnight + timedelta(days=1)


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


def sum_up(
    database: Database,
    by: Sequence[GroupBy],
    within: Range,
    key: str | None = None,
    *,
    most_rows: int | None = None,
) -> list[Row]:
    """In the order of the groups. `key` None: of all keys. `most_rows`: of requests that are read one by one, None for
    no limit. Raises `LedgerUnavailable` or `TooManyRows`.
    """
    days, cut = within.parts()
    sums: dict[tuple[str, ...], Amounts] = {}
    with database.read() as connection:
        if most_rows is not None:
            _check(connection, cut, key, most_rows)
        queries = [*([] if days is None else [_of_days(by, days, key)]), *(_of_times(by, part, key) for part in cut)]
        for row in (row for query in queries for row in connection.execute(query)):
            group, amounts = tuple(map(str, row[: len(by)])), Amounts(*map(int, row[len(by) :]))
            sums[group] = sums[group] + amounts if group in sums else amounts
    return [Row(group, amounts) for group, amounts in sorted(sums.items()) if amounts.requests]


def _check(connection: Connection, cut: Sequence[Range], key: str | None, most_rows: int) -> None:
    """Counting them in the index is cheap beside reading them."""
    for part in cut:
        rows = select(USAGE.c.id).where(*_conditions(part, key)).limit(most_rows + 1).subquery()
        most_rows -= connection.scalar(select(func.count()).select_from(rows)) or 0
    if most_rows < 0:
        raise TooManyRows


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
    counted = [USAGE.c[name] for name in COUNTED]
    return _summed(groups, counted, func.count()).where(*_conditions(within, key))


def _conditions(within: Range, key: str | None) -> list[ColumnElement[bool]]:
    """Of single requests."""
    return [*_between(USAGE.c.ended_at, within.start, within.end), *_of_key(USAGE.c.key, key)]


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
