"""The ledger's database: transactions, time limits, and errors without passwords."""

import importlib
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from serve_app.base.errors import ConfigRefused, LedgerUnavailable
from serve_app.ledger import schema

_TIMEOUT_S: Final = 5.0
_LOCK: Final = 0x726F756E64  # of the transactions that must not run side by side: creation, and holds of budgets
_FORMS: Final = "sqlite:///path or postgresql://user@host/database"
_MODE: Final = "roundhouse_mode"
_LIMIT: Final = text(  # the second one ends the lock of a process that was stopped
    "SELECT set_config('statement_timeout', :most, true), "
    "set_config('idle_in_transaction_session_timeout', :most, true)"
)
_MAX_REASON_CHARACTERS: Final = 300


class Database:
    """A pool of connections that are opened when they are needed. Thread-safe. `close` it."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._creating = threading.Lock()
        self._is_created = False
        self._inode: int | None = None

    @classmethod
    def of(cls, url: str, *, timeout_s: float = _TIMEOUT_S) -> Self:
        """Does not connect. `timeout_s`: for a connection, a lock or a statement. Raises `ConfigRefused`."""
        parsed = _parsed(url)
        options = _sqlite_options if parsed.drivername == "sqlite" else _postgres_options
        engine = create_engine(parsed, hide_parameters=True, **options(timeout_s))
        if parsed.drivername == "sqlite":
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
        return cls(engine, timeout_s)

    @property
    def name(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    @property
    def file(self) -> Path | None:
        """Of a SQLite database."""
        return Path(self._engine.url.database or "") if self._engine.dialect.name == "sqlite" else None

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[Connection]:
        """A transaction. `durable`: it survives a loss of power once it is committed. Raises `LedgerUnavailable`."""
        with self._reported():
            self._create_once()
            with self._begin("FULL" if durable else "NORMAL") as connection:
                yield connection

    @contextmanager
    def alone(self) -> Iterator[Connection]:
        """As `write`, but not durable, and no other such transaction runs meanwhile, in any process."""
        with self.write(durable=False) as connection:
            _lock(connection)
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads. Raises `LedgerUnavailable`."""
        with self._reported():
            self._create_once()
            with self._begin("") as connection:
                yield connection

    def ping(self) -> None:
        """Raises `LedgerUnavailable`."""
        with self.read() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        self._engine.dispose()

    def _create_once(self) -> None:
        with self._creating:
            if self._inode != self._file_inode():  # what open connections write into a deleted file is lost
                self._engine.dispose()
                self._is_created = False
            if self._is_created:
                return
            with self._begin("FULL") as connection:
                _lock(connection)
                schema.create(connection)
            self._inode = self._file_inode()
            self._is_created = True

    def _file_inode(self) -> int | None:
        """Of a SQLite database that is there."""
        try:
            return None if self.file is None else self.file.stat().st_ino
        except OSError:
            return None

    @contextmanager
    def _begin(self, mode: str) -> Iterator[Connection]:
        """`mode`: of SQLite's `synchronous`; empty for reading."""
        with self._engine.connect().execution_options(**{_MODE: mode}) as connection, connection.begin():
            if connection.dialect.name == "postgresql":
                connection.execute(_LIMIT, {"most": str(round(1000 * self._timeout_s))})
            yield connection

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except schema.SchemaTooNew as exc:
            raise LedgerUnavailable(str(exc)) from exc
        except SQLAlchemyError as exc:
            self._is_created = False  # a restored database may lack tables
            self._engine.dispose()  # and a connection may be to a file that was replaced
            raise LedgerUnavailable(self._reason(exc)) from exc

    def _reason(self, exc: SQLAlchemyError) -> str:
        """In one line. A driver may repeat a part of the URL."""
        cause: BaseException = exc.orig if isinstance(exc, DBAPIError) and exc.orig is not None else exc
        words = " ".join(str(cause).split())[:_MAX_REASON_CHARACTERS]
        password = self._engine.url.password
        return f"{type(cause).__name__}: {words.replace(password, '***') if password else words}"


def _parsed(url: str) -> URL:
    """Raises `ConfigRefused`, which does not repeat the URL: it may hold a password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as exc:
        raise ConfigRefused(f"ledger.url must be {_FORMS}.") from exc
    if parsed.drivername == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed
    if parsed.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ConfigRefused(f"ledger.url must be {_FORMS}, got the kind {parsed.drivername[:40]!r}.")
    try:
        importlib.import_module("psycopg")
    except ImportError as exc:
        raise ConfigRefused("ledger.url: PostgreSQL needs the extra 'postgres' of this package.") from exc
    return parsed.set(drivername="postgresql+psycopg")


def _sqlite_options(timeout_s: float) -> Mapping[str, object]:
    return {"connect_args": {"timeout": timeout_s}}


def _postgres_options(timeout_s: float) -> Mapping[str, object]:
    seconds = max(2, round(timeout_s))
    return {
        "isolation_level": "READ COMMITTED",  # `holds.py` relies on it
        "pool_pre_ping": True,
        "pool_timeout": timeout_s,
        "connect_args": {
            "connect_timeout": seconds,
            "tcp_user_timeout": 1000 * seconds,
            "keepalives_idle": seconds,
            "keepalives_interval": seconds,
            "keepalives_count": 2,
            "prepare_threshold": None,  # poolers hand a connection on, without its prepared statements
            "application_name": "roundhouse",
        },
    }


def _set_up_sqlite(connection: sqlite3.Connection, entry: ConnectionPoolEntry) -> None:
    del entry
    connection.isolation_level = None  # Python's own transactions would begin too late
    connection.execute("PRAGMA journal_mode = WAL")


def _begin_sqlite(connection: Connection) -> None:
    mode = connection.get_execution_options()[_MODE]
    if not mode:
        connection.exec_driver_sql("BEGIN")
        return
    connection.exec_driver_sql(f"PRAGMA synchronous = {mode}")
    connection.exec_driver_sql("BEGIN IMMEDIATE")  # else the upgrade of a lock fails without waiting


def _lock(connection: Connection) -> None:
    """Wait for other transactions that do this. Every writing transaction of SQLite does so anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
