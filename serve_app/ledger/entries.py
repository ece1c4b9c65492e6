"""Writes records into the database: their rows, the sums of their days, and the end of their holds."""

import logging
from collections.abc import Sequence
from datetime import date
from typing import Final

from sqlalchemy import Connection, delete
from sqlalchemy.exc import DataError, IntegrityError, StatementError

from serve_app.base.errors import LedgerUnavailable
from serve_app.ledger.database import Database
from serve_app.ledger.record import UsageRecord
from serve_app.ledger.schema import AMOUNTS, COUNTED, DAILY, GROUPS, HOLDS, USAGE, insert

logger = logging.getLogger(__name__)

Group = tuple[str, date, str, str, str]
_OF_RECORD: Final = (DataError, IntegrityError, OverflowError)
"""What a database raises for a value, and not for its own state."""


def write(database: Database, records: Sequence[UsageRecord]) -> int:
    """Insert what is not there yet; returns how many the database refuses. Raises `LedgerUnavailable`."""
    try:
        _write(database, records)
    except (LedgerUnavailable, OverflowError) as exc:
        if not _is_of_record(exc):
            raise
        if len(records) > 1:
            return sum(write(database, [record]) for record in records)
        logger.error("Ledger: the database refuses the record %s: %s", records[0].id, exc)
        return 1
    return 0


def _is_of_record(exc: Exception) -> bool:
    cause = exc.__cause__ or exc
    if isinstance(cause, StatementError) and not isinstance(cause, _OF_RECORD):
        return isinstance(cause.orig, OverflowError | UnicodeError)
    return isinstance(cause, _OF_RECORD)


def _write(database: Database, records: Sequence[UsageRecord]) -> None:
    with database.write() as connection:
        statement = insert(connection, USAGE).on_conflict_do_nothing(index_elements=["id"]).returning(USAGE.c.id)
        inserted = set(connection.scalars(statement, [record.row() for record in records]))
        _add(connection, [record for record in records if record.id in inserted])
        if held := [record.id for record in records if record.is_held]:
            connection.execute(delete(HOLDS).where(HOLDS.c.id.in_(held)))


def _add(connection: Connection, records: Sequence[UsageRecord]) -> None:
    """Add the records to the sums of their days."""
    sums: dict[Group, list[int]] = {}
    for record in records:
        group = (record.key, record.day, record.slug, record.endpoint, record.model)
        amounts = [1, *(getattr(record, name) for name in COUNTED)]
        sums[group] = [had + more for had, more in zip(sums.get(group, [0] * len(amounts)), amounts, strict=True)]
    if not sums:
        return
    statement = insert(connection, DAILY)
    grown = {name: DAILY.c[name] + statement.excluded[name] for name in AMOUNTS}
    # Every process locks the rows in this order, so none waits for another that waits for it.
    rows = [dict(zip((*GROUPS, *AMOUNTS), (*group, *sums[group]), strict=True)) for group in sorted(sums)]
    connection.execute(statement.on_conflict_do_update(index_elements=list(GROUPS), set_=grown), rows)
