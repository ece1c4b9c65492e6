"""The thread that moves records from spools to the database."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from serve_app.base.errors import LedgerUnavailable
from serve_app.ledger import entries
from serve_app.ledger.database import Database
from serve_app.ledger.holds import release_all
from serve_app.ledger.record import BrokenLine, UsageRecord, parse_line
from serve_app.ledger.spool import Folder, Segment, Spool, abandoned

logger = logging.getLogger(__name__)

_RECORDS_AT_ONCE: Final = 200  # a transaction of some 10 ms
_LONGEST_PAUSE_S: Final = 30.0
_ADOPT_INTERVAL_S: Final = 10.0


@dataclass(slots=True)
class LedgerCounters:
    """Totals of this process, each changed by one thread only."""

    records: int = 0
    dropped: int = 0
    refused: int = 0
    torn: int = 0
    adopted: int = 0
    write_errors: int = 0


@dataclass(slots=True)
class State:
    """What the writer and the ledger share. `num_appended`: records that came; `num_finished`: how many of the first of
    them are in the database, or lost. `unspooled`: records that the disk did not take. `adopted_bytes`: what processes
    that ended have left. `is_up`: whether the database answered the last time.
    """

    counters: LedgerCounters = field(default_factory=LedgerCounters)
    num_appended: int = 0
    num_finished: int = 0
    unspooled: deque[UsageRecord] = field(default_factory=deque)
    adopted_bytes: int = 0
    is_up: bool = True


class Writer:
    """Owns the spool and the database, and closes them at its end. `start` and `close` it. `report` is called in its
    thread after each round.
    """

    def __init__(
        self,
        spool: Spool,
        database: Database,
        state: State,
        *,
        interval_s: float,
        report: Callable[[], None],
        adopt_interval_s: float = _ADOPT_INTERVAL_S,
    ) -> None:
        self._spool = spool
        self._database = database
        self._state = state
        self._interval_s = interval_s
        self._report = report
        self._adopt_interval_s = adopt_interval_s
        self._adopted: list[Folder] = []
        self._adopted_at = float("-inf")
        self._pause_s = interval_s
        self._has_begun = False
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Begin the next round now."""
        self._wake.set()

    def close(self, within_s: float) -> bool:
        """Write what is there. Whether the thread ended in time; what is left stays on disk."""
        self._closing = True
        self.wake()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            closing = self._closing  # a round that began before may have missed the last records
            self._round()
            self._tell()
            if closing:
                break
            self._wake.wait(self._pause_s)
            self._wake.clear()
        for folder in self._adopted:
            folder.close()
        self._spool.close()
        self._database.close()

    def _round(self) -> None:
        state, mark = self._state, self._state.num_appended
        try:
            self._write_all()
        except (LedgerUnavailable, OSError) as exc:
            self._failed(exc)
        except Exception as exc:  # the last resort of this loop: nothing else would write again
            logger.exception("Ledger: a fault of the writer.")
            self._failed(exc)
        else:
            if not state.is_up:
                logger.warning("Ledger: the database %s is back.", self._database.name)
            state.num_finished, state.is_up, self._pause_s = mark, True, self._interval_s

    def _tell(self) -> None:
        try:
            self._state.adopted_bytes = sum(one.num_bytes for folder in self._adopted for one in folder.segments())
            self._report()
        except Exception:  # a disk that fails, or what the metrics raise: the records come first
            logger.exception("Ledger: its state cannot be reported.")

    def _failed(self, exc: Exception) -> None:
        self._state.counters.write_errors += 1
        self._pause_s = min(2 * self._pause_s, max(_LONGEST_PAUSE_S, self._interval_s))
        if self._state.is_up:
            logger.warning("Ledger: records wait on disk, the database %s fails: %s", self._database.name, exc)
        self._state.is_up = False

    def _write_all(self) -> None:
        """Raises `LedgerUnavailable`, or `OSError` for the spool."""
        self._adopt()
        if not (self._state.is_up and self._has_begun):
            self._database.ping()  # also at the start, so that the tables are there and an error is seen
            self._has_begun = True
        self._write_unspooled()
        self._write_closed()  # those of rounds that failed: until they are written, one segment grows
        self._spool.rotate()
        self._write_closed()
        while self._adopted:
            folder = self._adopted[-1]
            for segment in folder.segments():
                self._write(segment)
                segment.path.unlink(missing_ok=True)
            release_all(self._database, folder.writer)
            self._adopted.pop().remove()
            self._state.counters.adopted += 1

    def _write_closed(self) -> None:
        for segment in self._spool.closed():
            self._write(segment)
            self._spool.remove(segment)

    def _adopt(self) -> None:
        if not self._closing and time.monotonic() - self._adopted_at >= self._adopt_interval_s:
            self._adopted += abandoned(self._spool.folder.path.parent)
            self._adopted_at = time.monotonic()

    def _write_unspooled(self) -> None:
        waiting = self._state.unspooled
        while waiting:
            records = [waiting[index] for index in range(min(len(waiting), _RECORDS_AT_ONCE))]  # it may grow meanwhile
            self._insert(records)
            for _ in records:
                waiting.popleft()

    def _write(self, segment: Segment) -> None:
        before, records = self._state.counters.torn, self._records(segment)
        try:
            while chunk := list(islice(records, _RECORDS_AT_ONCE)):
                self._insert(chunk)
        except FileNotFoundError:  # without this, nothing would be written again
            logger.error("Ledger: %s is gone, and its records with it.", segment.path)
        if torn := self._state.counters.torn - before:
            logger.error("Ledger: %d lines of %s hold no record and are left out.", torn, segment.path)

    def _insert(self, records: list[UsageRecord]) -> None:
        refused = entries.write(self._database, records)
        self._state.counters.refused += refused
        self._state.counters.records += len(records) - refused

    def _records(self, segment: Segment) -> Iterator[UsageRecord]:
        for line in segment.lines():
            try:
                yield parse_line(line)
            except BrokenLine:
                self._state.counters.torn += 1
