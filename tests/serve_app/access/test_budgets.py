"""What a key may spend is counted by the ledger, and by this process while the ledger is away."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.access.auth import Caller
from serve_app.access.budgets import Budgets
from serve_app.base.errors import BudgetExceeded, LedgerUnavailable
from serve_app.ledger.holds import Answer, Ask
from serve_app.ledger.spend import Budget, Spend, Used

NOON = datetime(2031, 1, 31, 12, tzinfo=UTC)
CALLER = Caller("test", budget=Budget(cost_per_day=100, tokens_per_month=1000))
LIVES_S = 60.0


@dataclass
class FakeBooks:
    """A ledger whose database says what the test says; None: it is away."""

    used: Used | None = field(default_factory=Used)
    num_finished: int = 0
    asked: list[Ask] = field(default_factory=list)
    settled: dict[str, Spend] = field(default_factory=dict)

    def settle(self, record_id: str, spend: Spend) -> None:
        self.settled[record_id] = spend

    async def hold(self, ask: Ask) -> Answer:
        self.asked.append(ask)
        if self.used is None:
            raise LedgerUnavailable("away")
        known = self.used.holding(ask.unwritten)
        return Answer(known, ask.budget.reached(known))


@dataclass
class Kept:
    """Budgets with clocks and books that the test sets."""

    books: FakeBooks = field(default_factory=FakeBooks)
    now: datetime = NOON
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.budgets = Budgets(now=lambda: self.now, clock=lambda: self.seconds)
        self.budgets.books = self.books

    def hold(self, name: str, cost: int = 10, tokens: int = 10, caller: Caller = CALLER) -> bool:
        return asyncio.run(self.budgets.hold(caller, name, Spend(cost, tokens), lives_s=LIVES_S))

    def ended(self, name: str, cost: int, number: int = 1) -> None:
        self.budgets.ended("test", name, Spend(cost, cost), number)

    def refusal(self, act: Callable[[], object]) -> tuple[str, float]:
        with pytest.raises(BudgetExceeded) as refused:
            act()
        return str(refused.value), refused.value.retry_after_s


def test_a_key_without_a_budget_asks_nothing() -> None:
    kept = Kept()
    assert kept.hold("a", caller=Caller("free")) is False
    kept.budgets.check(Caller("free"))
    assert kept.books.asked == []


def test_the_most_that_a_request_can_cost_is_held_in_the_database() -> None:
    kept = Kept()
    assert kept.hold("a", 20, 30) is True
    assert kept.hold("b", 10**30, 10**30) is True
    first, second = kept.books.asked
    assert (first.id, first.key, first.most, first.lives_s) == ("a", "test", Spend(20, 30), LIVES_S)
    assert second.most == Spend(100, 1000)  # all of the limits, which lets nothing else begin


def test_what_a_request_did_not_need_is_given_back_when_it_ends() -> None:
    kept = Kept()
    kept.hold("a", 20)
    kept.books.used = None
    kept.hold("b", 20)
    kept.ended("a", 3)
    kept.ended("b", 4)
    kept.ended("unknown", 5)
    assert kept.books.settled == {"a": Spend(3, 3)}  # the database has no hold of the other


REFUSALS = [
    (Used(Spend(100), Spend(100)), "may spend 0.0000000001 USD per day (UTC); it is used up.", 12 * 3600),
    (Used(month=Spend(0, 1000)), "may use 1000 tokens per month (UTC); it is used up.", 12 * 3600),
    (
        Used(Spend(90), Spend(90), Spend(20, 5)),
        "may spend 0.0000000001 USD per day (UTC); 0.00000000001 USD are left, "
        "and its requests under way may need 0.00000000002 USD.",
        1,
    ),
]


@pytest.mark.parametrize(("used", "sentence", "retry_after_s"), REFUSALS)
def test_a_refusal_says_which_limit_and_when_it_ends(used: Used, sentence: str, retry_after_s: float) -> None:
    kept = Kept(FakeBooks(used))
    assert kept.refusal(lambda: kept.hold("a")) == (f"This key {sentence}", retry_after_s)


def test_a_key_that_has_spent_its_budget_is_refused_for_a_while_without_asking() -> None:
    kept = Kept(FakeBooks(Used(Spend(100))))
    said = kept.refusal(lambda: kept.hold("a"))
    for kept.seconds in (0.0, 4.9):
        assert kept.refusal(lambda: kept.budgets.check(CALLER)) == said
    kept.budgets.check(Caller("test", budget=Budget(cost_per_day=200)))  # the operator gave it more
    kept.budgets.check(Caller("other", budget=CALLER.budget))
    assert len(kept.books.asked) == 1


@pytest.mark.parametrize(
    ("now", "seconds"), [(NOON, 5.0), (NOON.replace(hour=23, minute=59, second=58), 2.0)], ids=["soon", "at midnight"]
)
def test_a_refusal_is_forgotten_after_a_while_and_at_the_end_of_its_period(now: datetime, seconds: float) -> None:
    kept = Kept(FakeBooks(Used(Spend(100))), now)
    kept.refusal(lambda: kept.hold("a"))
    kept.seconds = seconds - 0.1
    kept.refusal(lambda: kept.budgets.check(CALLER))
    kept.seconds = seconds
    kept.budgets.check(CALLER)


def test_a_key_whose_requests_hold_its_budget_asks_again_at_once() -> None:
    kept = Kept(FakeBooks(Used(held=Spend(100))))
    kept.refusal(lambda: kept.hold("a"))
    kept.budgets.check(CALLER)


# --- the database is away ---


def test_while_the_database_is_away_the_process_counts_on_from_what_it_knew() -> None:
    kept = Kept(FakeBooks(Used(Spend(50), Spend(50))))
    assert kept.hold("a", 20) is True
    kept.books.used = None
    assert kept.hold("b", 20) is False  # 50 spent, 20 held by a
    assert kept.hold("c", 20) is False  # and 20 by b
    assert kept.refusal(lambda: kept.hold("d", 20))[1] == 1
    kept.ended("b", 1)
    assert kept.hold("e", 10) is False  # 50 spent, 1 by b; 20 held by a, 20 by c
    kept.ended("a", 2)
    kept.ended("c", 3)
    kept.ended("e", 4)
    assert kept.hold("f", 40) is False  # 60 spent
    kept.ended("f", 40)
    assert kept.refusal(lambda: kept.hold("g"))[1] == 12 * 3600


def test_a_request_that_begins_again_without_the_database_is_counted_once() -> None:
    kept = Kept()
    assert kept.hold("a", 100) is True  # all of the limit
    kept.books.used = None
    assert kept.hold("a", 60) is False  # at another endpoint
    assert kept.hold("b", 10) is False
    kept.ended("a", 5)
    kept.ended("b", 5)
    assert kept.hold("c", 89) is False  # 10 are spent, and nothing is held
    assert kept.hold("d", 1) is False


def test_what_was_spent_counts_until_it_is_written_also_if_the_ledger_is_replaced_meanwhile() -> None:
    kept = Kept(FakeBooks(None))
    kept.hold("a", 30)
    kept.ended("a", 25, number=500)
    books = FakeBooks(Used())
    kept.budgets.replace_books(books)
    kept.hold("b")
    books.num_finished = 1  # it has written what the other one left before
    kept.hold("c")
    assert [ask.unwritten.cost for ask in books.asked] == [25, 0]


def test_what_was_spent_without_the_database_counts_until_it_is_written() -> None:
    kept = Kept(FakeBooks(None))
    kept.hold("a", 30)
    kept.hold("b", 30)
    kept.ended("a", 25, number=7)
    kept.books.used = Used()
    kept.hold("c")
    assert kept.books.asked[-1].unwritten == Spend(55, 35)  # what a spent and b holds
    kept.books.num_finished = 7
    kept.hold("d")
    assert kept.books.asked[-1].unwritten == Spend(30, 10)


def test_without_any_ledger_the_process_counts_alone() -> None:
    kept = Kept()
    kept.budgets.books = None
    for number in range(10):
        assert kept.hold(str(number)) is False
        kept.ended(str(number), 10, number=0)
    kept.refusal(lambda: kept.hold("more"))


def test_a_new_day_and_a_new_month_begin_with_nothing_spent() -> None:
    kept = Kept(FakeBooks(Used(Spend(99, 9), Spend(99, 900))), NOON - timedelta(days=1))
    kept.hold("a", 1)
    kept.ended("a", 1)
    kept.books.used = None
    kept.refusal(lambda: kept.hold("b"))
    kept.now = NOON  # the last of the month, which has 99 tokens left
    assert kept.hold("b", 1, 98) is False
    assert kept.hold("c", 1, 1) is False
    kept.refusal(lambda: kept.hold("d"))
    kept.now = NOON + timedelta(days=1)
    assert kept.hold("d", 1, 800) is False


def test_a_long_outage_takes_little_memory() -> None:
    kept = Kept(FakeBooks(None))
    rich = Caller("test", budget=Budget(cost_per_day=10**9))
    for number in range(1000):
        kept.hold(str(number), 1, caller=rich)
        kept.ended(str(number), 1, number + 1)
    local = kept.budgets._locals["test"]
    assert len(local.unwritten) <= 100
    assert (local.outside.cost, local.running, local.held) == (1000, {}, {})
    kept.books.num_finished, kept.books.used = 1000, Used()
    kept.hold("last", caller=rich)
    assert kept.books.asked[-1].unwritten == Spend()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), max_size=40))
def test_alone_a_process_passes_the_limit_by_less_than_one_request(requests: list[tuple[int, int, bool]]) -> None:
    """Requests that hold, cost and end at once or last. None costs more than it holds."""
    kept, spent, lasting, dearest = Kept(FakeBooks(None)), 0, {}, 1
    for number, (most, cost, ends) in enumerate(requests):
        try:
            kept.hold(str(number), most, 0)
        except BudgetExceeded:
            continue
        cost = min(most, cost)
        dearest = max(dearest, cost)
        if ends:
            kept.budgets.ended("test", str(number), Spend(cost), number + 1)
            spent += cost
        else:
            lasting[str(number)] = cost
    for name, cost in lasting.items():
        kept.budgets.ended("test", name, Spend(cost), 1)
    assert spent + sum(lasting.values()) < 100 + dearest
