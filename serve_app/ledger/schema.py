"""The tables of the ledger, for SQLite and PostgreSQL."""

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Date,
    DateTime,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

VERSION: Final = 1
TABLES: Final = MetaData()
Insert = sqlite.Insert | postgresql.Insert


class UtcTime(TypeDecorator[datetime]):
    """A time with its zone. SQLite has none: there it is UTC."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        del dialect
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def _text(name: str, **options: Any) -> Column[str]:
    return Column(name, Text, nullable=False, **options)


def _count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False)


SCHEMA: Final = Table("roundhouse_schema", TABLES, Column("version", Integer, primary_key=True))

USAGE: Final = Table(
    "roundhouse_usage",
    TABLES,
    _text("id", primary_key=True),
    Column("ended_at", UtcTime, nullable=False),
    Column("day", Date, nullable=False),
    _text("request_id"),
    _text("key"),
    _text("api"),
    _text("slug"),
    _text("endpoint"),
    _text("model"),
    _text("checkpoint"),
    _text("digest"),
    _count("prompt_tokens"),
    _count("cached_tokens"),
    _count("completion_tokens"),
    _count("reasoning_tokens"),
    _count("image_tokens"),
    Column("prompt_price", BigInteger),
    Column("cached_price", BigInteger),
    Column("completion_price", BigInteger),
    _count("cost"),
    Column("is_estimated", Boolean, nullable=False),
    Column("is_streamed", Boolean, nullable=False),
    Column("first_token_s", Float),
    Column("total_s", Float, nullable=False),
    Column("status", Integer, nullable=False),
    _text("outcome"),
    _text("error_code"),
    _text("finish_reason"),
    Index("roundhouse_usage_by_key", "key", "ended_at"),
    Index("roundhouse_usage_by_time", "ended_at"),
)
"""One row per request, never changed. `record.UsageRecord` has the meanings."""

DAILY: Final = Table(
    "roundhouse_usage_daily",
    TABLES,
    _text("key", primary_key=True),
    Column("day", Date, primary_key=True),
    _text("slug", primary_key=True),
    _text("endpoint", primary_key=True),
    _text("model", primary_key=True),
    _count("requests"),
    _count("prompt_tokens"),
    _count("cached_tokens"),
    _count("completion_tokens"),
    _count("reasoning_tokens"),
    _count("image_tokens"),
    _count("cost"),
)
"""The sums of USAGE. They change in the transaction that inserts the rows."""

HOLDS: Final = Table(
    "roundhouse_budget_holds",
    TABLES,
    _text("id", primary_key=True),
    _text("writer"),
    _text("key", index=True),
    Column("expires_at", UtcTime, nullable=False),
    _count("cost"),
    _count("tokens"),
)
"""What requests under way may cost their keys at most. `id`: of the record that will replace the row."""

AMOUNTS: Final = tuple(column.name for column in DAILY.columns if isinstance(column.type, BigInteger))
COUNTED: Final = tuple(name for name in AMOUNTS if name != "requests")
GROUPS: Final = tuple(column.name for column in DAILY.primary_key)


class SchemaTooNew(Exception):
    """Another version of this program has made the tables."""


def create(connection: Connection) -> None:
    """Create what is missing. The transaction must be the only one that does so. Raises `SchemaTooNew`."""
    TABLES.create_all(connection)
    connection.execute(insert(connection, SCHEMA).values(version=VERSION).on_conflict_do_nothing())
    newest = max(connection.scalars(select(SCHEMA.c.version)))
    if newest > VERSION:
        raise SchemaTooNew(f"The ledger's tables have version {newest}; this program knows {VERSION}.")


def insert(connection: Connection, table: Table) -> Insert:
    """An INSERT that can say what to do on a conflict."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)
