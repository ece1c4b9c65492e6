"""What was found out about files, kept on disk: no restart and no other ingress has to read them again.

A note is about a state of files: it counts while they are in that state. Notes live in one SQLite file, beside the disk
cache, which several processes may share. They are not flushed, so a crash of the machine may lose or damage them. A
note has a checksum, and a damaged file is replaced by an empty one.
"""

import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import datetime
from typing import Final, TypeVar

from serve_app.checkpoints.content import Content

logger = logging.getLogger(__name__)

FILE: Final = "notes-1.sqlite"
_MAX_NOTES: Final = 1_000_000
_WAIT_S: Final = 2.0
_SCHEMA: Final = """
    CREATE TABLE IF NOT EXISTS notes (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL, digest TEXT NOT NULL,
        text TEXT NOT NULL, checksum BLOB NOT NULL
    );
    CREATE INDEX IF NOT EXISTS notes_by_digest ON notes (digest);
"""

T = TypeVar("T")


class Notes:
    """The notes of one folder. Calls block on the disk. Thread-safe. What goes wrong is logged, and costs the notes."""

    def __init__(self, directory: str, max_notes: int = _MAX_NOTES) -> None:
        """Does not touch the disk yet. Of more than `max_notes`, the oldest go."""
        self._path = os.path.join(directory, FILE)
        self._max_notes = max_notes
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def get(self, name: str, state: str) -> str | None:
        """The text noted under this name for this state."""
        query = "SELECT text, checksum FROM notes WHERE name = ? AND state = ?"
        found = self._ask(lambda notes: notes.execute(query, (name, _hash(state))).fetchone(), None)
        if found is None or found[1] != _checksum(name, state, found[0]):
            return None
        return str(found[0])

    def last(self, name: str) -> str | None:
        """The digest in the note under this name, for whichever state."""
        query = "SELECT digest FROM notes WHERE name = ?"
        found = self._ask(lambda notes: notes.execute(query, (name,)).fetchone(), None)
        return None if found is None else str(found[0])

    def put(self, name: str, state: str, text: str, digest: str) -> None:
        """Replace the note under this name. `digest`: the content that it is about."""
        row = (name, _hash(state), digest, text, _checksum(name, state, text))
        statement = "INSERT OR REPLACE INTO notes (name, state, digest, text, checksum) VALUES (?, ?, ?, ?, ?)"

        def write(notes: sqlite3.Connection) -> None:
            last = notes.execute(statement, row).lastrowid or 0
            notes.execute("DELETE FROM notes WHERE number <= ?", (last - self._max_notes,))

        with suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
        self._ask(write, None, is_new=True)

    def forget(self, digest: str) -> None:
        """Drop what was noted about this content."""
        self._ask(lambda notes: notes.execute("DELETE FROM notes WHERE digest = ?", (digest,)), None)

    def close(self) -> None:
        with self._mutex:
            self._close()

    def _ask(self, call: Callable[[sqlite3.Connection], T], otherwise: T, *, is_new: bool = False) -> T:
        with self._mutex:
            try:
                if self._connection is None and not is_new and not os.path.exists(self._path):
                    return otherwise
                return call(self._opened())
            except sqlite3.OperationalError as exc:  # locked, read-only, or the disk is full
                logger.warning("The notes on checkpoints cannot be used: %s", exc)
            except sqlite3.DatabaseError as exc:
                logger.warning("The notes on checkpoints are damaged and begin anew: %s", exc)
                self._close()
                with suppress(OSError):
                    os.unlink(self._path)
            return otherwise

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(self._path, timeout=_WAIT_S, check_same_thread=False, isolation_level=None)
            try:
                # Not a write-ahead log: it does not work for several machines that share the folder.
                connection.execute("PRAGMA synchronous = OFF")
                connection.executescript(_SCHEMA)
            except sqlite3.Error:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            with closing(self._connection):
                self._connection = None


def written(content: Content) -> str:
    """The content as a note's text."""
    expires_at = content.expires_at.isoformat() if content.expires_at else None
    return json.dumps({**asdict(content), "expires_at": expires_at})


def read(text: str) -> Content | None:
    """The content in a note's text; None if another version wrote it."""
    try:
        fields = json.loads(text)
        expires_at = fields.pop("expires_at")
        return Content(**fields, expires_at=datetime.fromisoformat(expires_at) if expires_at else None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _hash(state: str) -> str:
    return hashlib.sha256(state.encode("utf-8", "surrogateescape")).hexdigest()


def _checksum(name: str, state: str, text: str) -> bytes:
    return hashlib.sha256(json.dumps([name, state, text]).encode()).digest()
