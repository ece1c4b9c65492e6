"""Budgets of keys: what a key may spend in a day and a month, over all ingresses.

The ledger's database counts. While it is away, this process counts for itself: what it knew last, and what its own
requests have spent since.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Final, Protocol

from serve_app.access.auth import Caller
from serve_app.base.errors import BudgetExceeded, LedgerUnavailable
from serve_app.ledger.holds import Answer, Ask
from serve_app.ledger.money import spelled
from serve_app.ledger.spend import Budget, Reached, Spend, Used, month_of, seconds_left

_REMEMBERED_S: Final = 5.0
_MOST_UNWRITTEN: Final = 100
_RETRY_S: Final = 1.0  # when a request must wait for another one to end, which can happen at any time

Clock = Callable[[], float]


class Books(Protocol):
    """The ledger, as far as budgets need it."""

    @property
    def num_finished(self) -> int: ...

    async def hold(self, ask: Ask) -> Answer: ...

    def settle(self, record_id: str, spend: Spend) -> None: ...


@dataclass(slots=True)
class _Local:
    """What this process knows of one key. `known` is of the day `on`, with its own requests `held` that have ended
    since. `running`, `unwritten`: requests that began without the database; the second have ended, and their records,
    of these numbers, may not be in it yet.
    """

    known: Used = field(default_factory=Used)
    on: date = date.min
    held: dict[str, Spend] = field(default_factory=dict)
    running: dict[str, Spend] = field(default_factory=dict)
    unwritten: list[tuple[int, date, Spend]] = field(default_factory=list)

    def known_on(self, today: date) -> Used:
        if self.on == today:
            return self.known
        is_same_month = month_of(self.on) == month_of(today)
        return Used(month=self.known.month if is_same_month else Spend(), held=self.known.held)

    def used(self, today: date) -> Used:
        used = self.known_on(today)
        for _, day, spend in self.unwritten:
            if month_of(day) == month_of(today):
                used = Used(used.day + spend if day == today else used.day, used.month + spend, used.held)
        return used.holding(self.in_progress)

    @property
    def in_progress(self) -> Spend:
        return sum(self.running.values(), Spend())

    @property
    def outside(self) -> Spend:
        """What the database does not know."""
        return sum((spend for _, _, spend in self.unwritten), self.in_progress)

    def begin_again(self, record_id: str) -> None:
        """Let go of what the request held before."""
        self.running.pop(record_id, None)
        held = self.held.pop(record_id, None)
        if held is not None:
            self.known = self.known.ending(held, Spend())

    def learn(self, used: Used, today: date, record_id: str, most: Spend) -> None:
        """The database's answer for a request that may begin."""
        self.known, self.on = used.holding(most), today
        self.held[record_id] = most

    def ended(self, record_id: str, spend: Spend, today: date, number: int) -> bool:
        """Whether the database has a hold of the request."""
        held, running = self.held.pop(record_id, None), self.running.pop(record_id, None)
        if running is not None:
            self._note(number, today, spend)
        elif held is not None:
            self.known, self.on = self.known_on(today).ending(held, spend), today
        return held is not None

    def _note(self, number: int, today: date, spend: Spend) -> None:
        """In a long outage the last entry takes in the following ones."""
        if len(self.unwritten) >= _MOST_UNWRITTEN and self.unwritten[-1][1] == today:
            spend += self.unwritten.pop()[2]
        self.unwritten.append((number, today, spend))

    def forget(self, num_finished: int) -> None:
        """Drop what is in the database by now."""
        self.unwritten = [one for one in self.unwritten if one[0] > num_finished]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A limit that was reached a moment ago."""

    budget: Budget
    reached: Reached
    until: float


class Budgets:
    """Used by one event loop. `books`: the ledger, None without one."""

    def __init__(
        self,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Clock = time.monotonic,
    ) -> None:
        self.books: Books | None = None
        self._now = now
        self._clock = clock
        self._locals: dict[str, _Local] = {}
        self._refusals: dict[str, _Refusal] = {}

    def replace_books(self, books: Books | None) -> None:
        """The next ledger counts its records from zero. With its first one it has written what the last one left."""
        self.books = books
        for local in self._locals.values():
            local.unwritten = [(1, day, spend) for _, day, spend in local.unwritten]

    def check(self, caller: Caller) -> None:
        """Raises `BudgetExceeded` for a key that has spent its budget, as far as that is known without asking."""
        refusal = self._refusals.get(caller.name)
        if refusal is None:
            return
        if refusal.budget == caller.budget and self._clock() < refusal.until:
            raise self._exceeded(refusal.reached)
        del self._refusals[caller.name]

    async def hold(self, caller: Caller, record_id: str, most: Spend, *, lives_s: float) -> bool:
        """Hold the most that a request can cost, until its record is in the ledger; again for a request that begins
        again. `lives_s`: longer than the request can last. Returns whether the database has the hold. Raises
        `BudgetExceeded`; then nothing is held.
        """
        budget = caller.budget
        if not budget:
            return False
        local, most = self._locals.setdefault(caller.name, _Local()), budget.cap(most)
        local.begin_again(record_id)
        if self.books is not None:
            local.forget(self.books.num_finished)
        answer = await self._ask(Ask(record_id, caller.name, budget, most, local.outside, lives_s))
        reached = budget.reached(local.used(self._now().date())) if answer is None else answer.reached
        if reached is not None:
            self._remember(caller, reached)
            raise self._exceeded(reached)
        if answer is None:
            local.running[record_id] = most
        else:
            local.learn(answer.used, self._now().date(), record_id, most)
        return answer is not None

    def ended(self, key: str, record_id: str, spend: Spend, number: int) -> None:
        """A request has ended; its record is the `number`th of this process's ledger."""
        local = self._locals.get(key)
        is_held = local is not None and local.ended(record_id, spend, self._now().date(), number)
        if is_held and self.books is not None:
            self.books.settle(record_id, spend)

    async def _ask(self, ask: Ask) -> Answer | None:
        """None if the database does not answer."""
        try:
            return None if self.books is None else await self.books.hold(ask)
        except LedgerUnavailable:
            return None

    def _remember(self, caller: Caller, reached: Reached) -> None:
        """So that a key that goes on asking costs the database nothing."""
        if reached.is_spent:
            for_s = min(_REMEMBERED_S, seconds_left(reached.period, self._now()))
            self._refusals[caller.name] = _Refusal(caller.budget, reached, self._clock() + for_s)

    def _exceeded(self, reached: Reached) -> BudgetExceeded:
        def shown(amount: int) -> str:
            return f"{spelled(amount)} USD" if reached.is_cost else f"{amount} tokens"

        verb = "spend" if reached.is_cost else "use"
        sentence = f"This key may {verb} {shown(reached.limit)} per {reached.period} (UTC)"
        if reached.is_spent:
            return BudgetExceeded(f"{sentence}; it is used up.", seconds_left(reached.period, self._now()))
        left, held = shown(reached.limit - reached.spent), shown(reached.held)
        return BudgetExceeded(f"{sentence}; {left} are left, and its requests under way may need {held}.", _RETRY_S)
