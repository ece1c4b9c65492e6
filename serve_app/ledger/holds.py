"""Holds: what requests under way may cost, in the database, so that several ingresses keep one budget.

One thread asks the database for all requests that wait, in one transaction. So a flood of requests costs few
transactions, and requests of keys without a budget cost none.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, bindparam, case, delete, func, null, select, union_all, update

from serve_app.base.errors import LedgerUnavailable
from serve_app.ledger.database import Database
from serve_app.ledger.schema import DAILY, HOLDS
from serve_app.ledger.spend import Budget, Reached, Spend, Used, month_of

logger = logging.getLogger(__name__)

ANSWER_S: Final = 1.0
_MOST_AT_ONCE: Final = 500
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that wants to begin. `id`: of its record; `most`: the most that it can cost; `unwritten`: what its
    ingress knows to be spent and the database does not; `lives_s`: how long the hold stays if no record ends it.
    """

    id: str
    key: str
    budget: Budget
    most: Spend
    unwritten: Spend
    lives_s: float
    answer: "Future[Answer]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Answer:
    """`used`: without this request. `reached` None: it may begin, and its hold is there."""

    used: Used
    reached: Reached | None


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a hold for which nobody waits any more."""

    id: str


class HoldDesk:
    """`close` it. Its thread begins with the first question.

    After a failure, or an answer that is late, nobody is asked until a transaction succeeds in time. The thread tries
    one from time to time, so no request waits for it.
    """

    def __init__(
        self, database: Database, writer: str, now: Clock = lambda: datetime.now(UTC), *, answer_s: float = ANSWER_S
    ) -> None:
        """`answer_s`: the longest that a request waits."""
        self._database = database
        self._writer = writer
        self._now = now
        self._answer_s = answer_s
        self._waiting: queue.SimpleQueue[Ask | Release | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._to_release: set[str] = set()
        self._settled: dict[str, Spend] = {}
        self._pause_s = _FIRST_PAUSE_S
        self.is_away = False

    async def ask(self, ask: Ask) -> Answer:
        """Raises `LedgerUnavailable`."""
        if self.is_away:
            raise LedgerUnavailable("The database is away.")
        self._begin()
        self._waiting.put(ask)
        try:
            async with asyncio.timeout(self._answer_s):
                return await asyncio.wrap_future(ask.answer)
        except TimeoutError as exc:
            reason = f"No answer within {self._answer_s:g} s."
            self._note_away(reason)
            self._waiting.put(Release(ask.id))
            raise LedgerUnavailable(reason) from exc
        except asyncio.CancelledError:
            self._waiting.put(Release(ask.id))
            raise

    def settle(self, record_id: str, spend: Spend) -> None:
        """A request has ended and cost less than it holds. The next question takes that into account, also while the
        record waits to be written.
        """
        self._settled[record_id] = spend

    def close(self) -> None:
        """Does not wait: the database may hang."""
        self._waiting.put(None)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ledger-holds", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            asks = [one for one in batch if isinstance(one, Ask) and one.answer.set_running_or_notify_cancel()]
            self._to_release |= {one.id for one in batch if isinstance(one, Release)}
            began_at = time.monotonic()
            try:
                answers = self._decide(asks)
            except LedgerUnavailable as exc:
                self._fail(asks, str(exc))
            except Exception as exc:  # the last resort of this loop: nobody else would answer again
                logger.exception("Ledger: a fault of the budgets.")
                self._fail(asks, type(exc).__name__)
            else:
                self._to_release.clear()
                for ask, answer in zip(asks, answers, strict=True):
                    ask.answer.set_result(answer)
                if time.monotonic() - began_at < self._answer_s:
                    self._note_back()

    def _next(self) -> list[Ask | Release] | None:
        """What waits now; nothing when it is time for a try; None at the end."""
        batch: list[Ask | Release] = []
        try:
            one = self._waiting.get(timeout=self._pause_s if self.is_away else None)
            while one is not None:
                batch.append(one)
                if len(batch) == _MOST_AT_ONCE or self._waiting.empty():
                    return batch
                one = self._waiting.get()
        except queue.Empty:
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            return batch
        return None

    def _fail(self, asks: Sequence[Ask], reason: str) -> None:
        self._note_away(reason)
        for ask in asks:
            ask.answer.set_exception(LedgerUnavailable(reason))

    def _note_away(self, reason: str) -> None:
        if not self.is_away:
            logger.warning("Ledger: each process counts budgets for itself, the database fails: %s", reason)
        self.is_away = True

    def _note_back(self) -> None:
        if self.is_away:
            logger.warning("Ledger: the database counts budgets again.")
        self.is_away, self._pause_s = False, _FIRST_PAUSE_S

    def _decide(self, asks: Sequence[Ask]) -> list[Answer]:
        """Raises `LedgerUnavailable`."""
        now = self._now()
        answers: list[Answer] = []
        with self._database.alone() as connection:
            # A request that asks again, for another replica or endpoint, replaces its hold.
            gone = [*self._to_release, *(ask.id for ask in asks)]
            connection.execute(delete(HOLDS).where((HOLDS.c.expires_at <= now) | HOLDS.c.id.in_(gone)))
            self._lower(connection)
            used = _used(connection, {ask.key for ask in asks}, now.date())
            for ask in asks:
                known = used.get(ask.key, Used()).holding(ask.unwritten)
                reached = ask.budget.reached(known)
                answers.append(Answer(known, reached))
                if reached is None:
                    used[ask.key] = used.get(ask.key, Used()).holding(ask.most)
            begun = [ask for ask, answer in zip(asks, answers, strict=True) if answer.reached is None]
            if begun:
                connection.execute(HOLDS.insert(), [self._row(ask, now) for ask in begun])
        return answers

    def _lower(self, connection: Connection) -> None:
        """Lower the holds of requests that have ended; those whose record is written are gone."""
        ended, self._settled = self._settled, {}
        if ended:
            lowered = update(HOLDS).where(HOLDS.c.id == bindparam("ended"))
            amounts = [{"ended": name, "cost": spend.cost, "tokens": spend.tokens} for name, spend in ended.items()]
            connection.execute(lowered.values(cost=bindparam("cost"), tokens=bindparam("tokens")), amounts)

    def _row(self, ask: Ask, now: datetime) -> dict[str, object]:
        expires_at = now + timedelta(seconds=ask.lives_s)
        cost, tokens = ask.most.cost, ask.most.tokens
        return {
            "id": ask.id,
            "writer": self._writer,
            "key": ask.key,
            "expires_at": expires_at,
            "cost": cost,
            "tokens": tokens,
        }


def release_all(database: Database, writer: str) -> None:
    """End the holds of a process that ended: its requests ended with it. Raises `LedgerUnavailable`."""
    with database.write() as connection:
        connection.execute(delete(HOLDS).where(HOLDS.c.writer == writer))


def _used(connection: Connection, keys: set[str], today: date) -> dict[str, Used]:
    """What keys have used, in one statement: a record that becomes a row meanwhile is seen as its hold or as the row,
    never as neither.
    """
    if not keys:
        return {}
    tokens = DAILY.c.prompt_tokens + DAILY.c.completion_tokens
    kind = case((DAILY.c.day == today, "today"), else_="earlier")
    days = select(DAILY.c.key, kind.label("kind"), DAILY.c.cost, tokens.label("tokens")).where(
        DAILY.c.key.in_(keys), DAILY.c.day >= month_of(today)
    )
    held = select(HOLDS.c.key, null().label("kind"), HOLDS.c.cost, HOLDS.c.tokens).where(HOLDS.c.key.in_(keys))
    both = union_all(days, held).subquery()
    amounts = func.sum(both.c.cost), func.sum(both.c.tokens)
    rows = connection.execute(select(both.c.key, both.c.kind, *amounts).group_by(both.c.key, both.c.kind)).all()
    found = {(key, kind): Spend(int(cost), int(num_tokens)) for key, kind, cost, num_tokens in rows}
    return dict(_by_key(found, keys))


def _by_key(found: dict[tuple[str, Any], Spend], keys: set[str]) -> Iterator[tuple[str, Used]]:
    for key in keys:
        today = found.get((key, "today"), Spend())
        earlier = found.get((key, "earlier"), Spend())
        yield key, Used(today, earlier + today, found.get((key, None), Spend()))
