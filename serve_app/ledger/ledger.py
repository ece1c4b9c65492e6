"""The ledger of one ingress: takes records, keeps them on disk, and answers what keys have used."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Self

from serve_app.base.errors import ConfigRefused, LedgerUnavailable
from serve_app.config.ledger import LedgerConfig
from serve_app.ledger.database import Database
from serve_app.ledger.holds import ANSWER_S, Answer, Ask, HoldDesk
from serve_app.ledger.record import UsageRecord
from serve_app.ledger.spend import Spend
from serve_app.ledger.spool import Spool
from serve_app.ledger.sums import GroupBy, Range, Row, sum_up
from serve_app.ledger.writer import LedgerCounters, State, Writer

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
READ_S: Final = 5.0
MOST_ROWS: Final = 200_000  # of single requests in one answer: some 0.2 s in SQLite
_MOST_UNSPOOLED: Final = 10_000  # 10 MB
_LOG_INTERVAL_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """What metrics tell of a ledger. `waiting_bytes`: of records that are not in the database."""

    counters: LedgerCounters
    waiting_bytes: int
    is_up: bool


Report = Callable[[LedgerReport], None]


def _report_nothing(report: LedgerReport) -> None:
    del report


class Ledger:
    """`close` it. `append` is for one thread; the rest is thread-safe."""

    def __init__(
        self,
        database: Database,
        spool: Spool,
        config: LedgerConfig,
        report: Report = _report_nothing,
        *,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`answer_s`: the longest that a request waits for its budget."""
        self._database = database
        self._spool = spool
        self._spool_bytes = config.spool_bytes
        self._directory = config.folder
        self._report = report
        self._state = State()
        self._logged_at = float("-inf")
        self._is_closed = False
        self._writer = Writer(spool, database, self._state, interval_s=config.write_interval_s, report=self._tell)
        self._holds = HoldDesk(database, spool.folder.writer, answer_s=answer_s)
        self._readers = ThreadPoolExecutor(2, thread_name_prefix="ledger-read")
        self._writer.start()

    @classmethod
    def of(cls, config: LedgerConfig, report: Report = _report_nothing, *, answer_s: float = ANSWER_S) -> Self:
        """Does not wait for the database. Raises `ConfigRefused`."""
        return cls(open_database(config), Spool.open(config.folder), config, report, answer_s=answer_s)

    @staticmethod
    def check(config: LedgerConfig, more_variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """Open what `of` opens, and leave nothing behind but the folders. Raises `ConfigRefused`."""
        open_database(config, more_variables).close()
        Spool.open(config.folder).close()

    @property
    def is_up(self) -> bool:
        """Whether the database answered the last time."""
        return self._state.is_up

    @property
    def num_appended(self) -> int:
        """How many records came."""
        return self._state.num_appended

    @property
    def num_finished(self) -> int:
        """The first so many of the records that came are in the database, or lost."""
        return self._state.num_finished

    @property
    def report(self) -> LedgerReport:
        state = self._state
        return LedgerReport(state.counters, self._spool.num_bytes + state.adopted_bytes, state.is_up)

    def append(self, record: UsageRecord) -> None:
        """Keep a record on disk. Never raises, and never waits for the database. A record over the bound is dropped."""
        state = self._state
        line = record.line()
        if self._is_closed:
            self._leave(line)
        elif self._spool.num_bytes + state.adopted_bytes + len(line) > self._spool_bytes:
            self._drop("more than ledger.spool_bytes wait for the database")
        else:
            try:
                self._spool.append(line)
            except OSError as exc:
                self._keep(record, exc)
        state.num_appended += 1  # after the line is there: a round that sees the number writes the line

    async def hold(self, ask: Ask) -> Answer:
        """Raises `LedgerUnavailable`, at once while the database is away."""
        return await self._holds.ask(ask)

    def settle(self, record_id: str, spend: Spend) -> None:
        """The request of a hold has ended, and its record was appended."""
        self._holds.settle(record_id, spend)

    async def sum_up(self, by: Sequence[GroupBy], within: Range, key: str) -> list[Row]:
        """What a key has used; records of the last moments may be missing. Raises `LedgerUnavailable`, or `TooManyRows`
        for a range of times.
        """
        if not self.is_up:
            raise LedgerUnavailable("The database is away.")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(READ_S):
                read = partial(sum_up, self._database, by, within, key, most_rows=MOST_ROWS)
                return await loop.run_in_executor(self._readers, read)
        except TimeoutError as exc:
            raise LedgerUnavailable(f"No answer within {READ_S:g} s.") from exc

    def write_now(self) -> None:
        """Do not wait for the next interval."""
        self._writer.wake()

    def close(self, within_s: float = CLOSE_S) -> None:
        """Write what waits, for so long at most. The rest stays on disk, for the next ingress with this folder."""
        self._is_closed = True
        self._holds.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        if not self._writer.close(within_s) or self._spool.num_bytes:
            logger.warning("Ledger: %d bytes of records stay on disk.", self._spool.num_bytes)

    def _leave(self, line: bytes) -> None:
        """In a folder of its own, for the next ingress with this one: the writer has ended, or does so just now."""
        try:
            spool = Spool.open(self._directory)
            spool.append(line)
            spool.close()
        except (ConfigRefused, OSError) as exc:
            self._drop(f"the spool fails after the end: {exc}")

    def _keep(self, record: UsageRecord, exc: OSError) -> None:
        """In memory: the disk is full, or fails."""
        if len(self._state.unspooled) >= _MOST_UNSPOOLED:
            self._drop(f"the spool fails: {exc.strerror}")
            return
        self._state.unspooled.append(record)
        self._log("Ledger: records are kept in memory, the spool fails: %s", str(exc.strerror))

    def _drop(self, reason: str) -> None:
        self._state.counters.dropped += 1
        self._log("Ledger: records are dropped, %s.", reason)

    def _log(self, message: str, reason: str) -> None:
        """Once a minute."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_INTERVAL_S:
            self._logged_at = now
            logger.error("%s (%d dropped so far)", message % reason, self._state.counters.dropped)

    def _tell(self) -> None:
        self._report(self.report)


def open_database(config: LedgerConfig, more_variables: Mapping[str, str] = MappingProxyType({})) -> Database:
    """Does not connect. Raises `ConfigRefused`."""
    database = Database.of(config.database_url(more_variables))
    if database.file is not None and database.file.parent != config.folder:  # the spool makes that one
        try:
            database.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            got = f"got {str(database.file)!r}: {exc.strerror}"
            raise ConfigRefused(f"ledger.url must be a file in a folder that can be written, {got}.") from exc
    return database
