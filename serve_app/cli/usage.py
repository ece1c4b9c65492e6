"""`python -m serve_app usage`: sums of the ledger, as a table, JSON or CSV."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from types import MappingProxyType
from typing import Literal

from serve_app.base.errors import ConfigRefused
from serve_app.cli.output import say
from serve_app.config.ledger import LedgerConfig
from serve_app.ledger.database import Database
from serve_app.ledger.sums import GROUPINGS, GroupBy, Range, Row, sum_up, total

Form = Literal["table", "json", "csv"]


def print_usage(
    config: LedgerConfig,
    by: Sequence[GroupBy],
    within: Range,
    *,
    key: str | None,
    form: Form,
    more_variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raises `ConfigRefused` for a database that is not there, and `LedgerUnavailable`."""
    database = Database.of(config.database_url(more_variables))
    if database.file is not None and not database.file.is_file():
        raise ConfigRefused(f"There is no ledger at {str(database.file)!r}: no request has been recorded there yet.")
    try:
        rows = sum_up(database, by, within, key)
    finally:
        database.close()
    shown = {"table": _table, "json": _json, "csv": _csv}[form]
    say(shown(by, rows))


def parse_groups(text: str) -> tuple[GroupBy, ...]:
    """`key,model`. Raises `ConfigRefused`."""
    parts = [part.strip() for part in text.split(",")]
    groups = tuple(name for part in parts for name in GROUPINGS if name == part)
    if len(groups) < len(parts) or len(set(groups)) < len(groups):
        raise ConfigRefused(f"--by must be some of {', '.join(GROUPINGS)}, separated by commas, got {text!r}.")
    return groups


def parse_range(first: str | None, last: str | None) -> Range:
    """From one UTC day to another, both included; None is no bound. Raises `ConfigRefused`."""
    start, end = _day("--from", first), _day("--to", last)
    if start is not None and end is not None and start > end:
        raise ConfigRefused(f"--from must not be after --to, got {first} and {last}.")
    return Range(start, None if end is None else end + timedelta(days=1))


def _day(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.combine(date.fromisoformat(text), time(), UTC)
    except ValueError as exc:
        raise ConfigRefused(f"{option} must be a date such as 2031-01-31, got {text!r}.") from exc


def _objects(by: Sequence[GroupBy], rows: Sequence[Row]) -> list[dict[str, int | str]]:
    return [{**dict(zip(by, row.group, strict=True)), **row.amounts.shown()} for row in rows]


def _json(by: Sequence[GroupBy], rows: Sequence[Row]) -> str:
    return json.dumps({"rows": _objects(by, rows), "total": total(rows).shown()}, indent=2)


def _csv(by: Sequence[GroupBy], rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*by, *total(rows).shown()], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_objects(by, rows))
    return text.getvalue().rstrip("\n")


def _table(by: Sequence[GroupBy], rows: Sequence[Row]) -> str:
    """Columns as wide as they must be: names to the left, numbers to the right."""
    names: dict[str, int | str] = {**dict.fromkeys(by, ""), by[0]: "total"}
    last = {**names, **total(rows).shown()}
    lines = [list(last), *(list(map(str, line.values())) for line in [*_objects(by, rows), last])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths, len(by)) for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int], num_names: int) -> str:
    cells = [
        cell.ljust(width) if index < num_names else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
