"""What requests cost, and the budget of a key that bounds it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Literal

Period = Literal["day", "month"]


@dataclass(frozen=True, slots=True)
class Spend:
    """`cost` in 10^-12 USD; `tokens` of prompt and reply."""

    cost: int = 0
    tokens: int = 0

    def __add__(self, other: "Spend") -> "Spend":
        return Spend(self.cost + other.cost, self.tokens + other.tokens)


@dataclass(frozen=True, slots=True)
class Used:
    """What a key has spent in the present periods, and the most that its requests under way may still spend."""

    day: Spend = Spend()
    month: Spend = Spend()
    held: Spend = Spend()

    def of(self, period: Period) -> Spend:
        return self.day if period == "day" else self.month

    def holding(self, more: Spend) -> "Used":
        return Used(self.day, self.month, self.held + more)

    def ending(self, held: Spend, spent: Spend) -> "Used":
        """After the end of a request that held this and spent that."""
        left = Spend(max(0, self.held.cost - held.cost), max(0, self.held.tokens - held.tokens))
        return Used(self.day + spent, self.month + spent, left)


@dataclass(frozen=True, slots=True)
class Reached:
    """A limit that a key has reached. `spent` and `held` are in the limit's unit; `is_spent`: without what is held."""

    period: Period
    is_cost: bool
    limit: int
    spent: int
    held: int

    @property
    def is_spent(self) -> bool:
        return self.spent >= self.limit


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one key per UTC day and month; None is no limit."""

    cost_per_day: int | None = None
    cost_per_month: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self != Budget()

    def cap(self, most: Spend) -> Spend:
        """What a request must hold that costs this at most: nothing where there is no limit, and never more than the
        limit, because all of it lets no other request begin.
        """
        cost = max(self.cost_per_day or 0, self.cost_per_month or 0)
        tokens = max(self.tokens_per_day or 0, self.tokens_per_month or 0)
        return Spend(min(most.cost, cost), min(most.tokens, tokens))

    def reached(self, used: Used) -> Reached | None:
        """The limit that lets no further request begin, the one of the longest wait if there are several.

        A request may begin while less than the limit is spent and held. Each request holds the most that it can cost.
        So a key ends at most one request's cost over its limit.
        """
        found = [one for one in self._counts(used) if one.spent + one.held >= one.limit]
        return max(found, key=lambda one: (one.is_spent, one.period == "month"), default=None)

    def _counts(self, used: Used) -> Iterator[Reached]:
        limits: tuple[tuple[Period, bool, int | None], ...] = (
            ("day", True, self.cost_per_day),
            ("month", True, self.cost_per_month),
            ("day", False, self.tokens_per_day),
            ("month", False, self.tokens_per_month),
        )
        for period, is_cost, limit in limits:
            if limit is not None:
                spent, held = used.of(period), used.held
                amounts = (spent.cost, held.cost) if is_cost else (spent.tokens, held.tokens)
                yield Reached(period, is_cost, limit, *amounts)


def month_of(day: date) -> date:
    """Its first day."""
    return day.replace(day=1)


def seconds_left(period: Period, now: datetime) -> float:
    """Until the period of `now`, which is in UTC, ends."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return (midnight + timedelta(days=1) - now).total_seconds()
    following = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (following - now).total_seconds()
