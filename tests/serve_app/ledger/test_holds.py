"""A budget holds over all processes: what is spent and held never passes it by more than one request."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from serve_app.base.errors import LedgerUnavailable
from serve_app.ledger import entries, schema
from serve_app.ledger.database import Database
from serve_app.ledger.holds import Answer, Ask, HoldDesk, release_all
from serve_app.ledger.record import microseconds
from serve_app.ledger.spend import Budget, Reached, Spend, Used, seconds_left
from serve_app.ledger.sums import Range, sum_up, total
from tests.support.ledger.usage_records import NOON, usage_record
from tests.support.processes.running_up import ROOT
from tests.support.waiting import eventually

pytest_plugins = ("tests.support.ledger.ledger_fixtures",)

LONG_S = 30.0  # that an answer may take; the machine may be busy


class Time:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = Database.of(database_url)
    yield opened
    opened.close()


def ask(
    name: str = "1", *, cost: int = 10, tokens: int = 0, key: str = "test", lives_s: float = 60, **more: Any
) -> Ask:
    budget = more.get("budget", Budget(cost_per_day=100))
    return Ask(name, key, budget, Spend(cost, tokens), more.get("unwritten", Spend()), lives_s)


def answers(desk: HoldDesk, *asks: Ask) -> list[Answer]:
    async def asked() -> list[Answer]:
        return await asyncio.gather(*(desk.ask(one) for one in asks))

    return asyncio.run(asked())


def held(database: Database) -> int:
    with database.read() as connection:
        return connection.scalar(select(func.count()).select_from(schema.HOLDS)) or 0


# --- one desk ---


def test_requests_begin_until_the_limit_is_held(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    found = answers(desk, *(ask(str(number), cost=30) for number in range(6)))
    assert [answer.reached is None for answer in found] == [True] * 4 + [False] * 2
    assert found[4] == Answer(Used(held=Spend(120)), Reached("day", True, 100, 0, 120))
    assert held(database) == 4
    desk.close()


def test_a_record_takes_the_place_of_its_hold(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    answers(desk, ask("a", cost=9), ask("b", cost=90))
    entries.write(database, [usage_record(id="a", cost=3, is_held=True)])
    (answer,) = answers(desk, ask("c"))
    assert answer.used == Used(Spend(3, 15), Spend(3, 15), Spend(90))
    assert held(database) == 2
    desk.close()


def test_a_request_that_asks_again_holds_once(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    for cost in (90, 50, 70):
        (answer,) = answers(desk, ask("same", cost=cost))
        assert answer.used.held == Spend()
    assert answers(desk, ask("other"))[0].used.held == Spend(70)
    desk.close()


def test_a_request_that_ended_holds_what_it_cost_until_its_record_is_written(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    answers(desk, ask("a", cost=90), ask("b", cost=90))
    desk.settle("a", Spend(3, 15))
    assert answers(desk, ask("c"))[0].used == Used(held=Spend(93, 15))
    entries.write(database, [usage_record(id="a", cost=3, is_held=True)])
    desk.settle("a", Spend(3, 15))  # too late
    assert answers(desk, ask("c"))[0].used == Used(Spend(3, 15), Spend(3, 15), Spend(90))
    desk.close()


def test_a_hold_ends_when_its_request_can_no_longer_run(database: Database) -> None:
    time = Time()
    desk = HoldDesk(database, "w", time, answer_s=LONG_S)
    answers(desk, ask("lost", cost=100, lives_s=60))
    time.now += timedelta(seconds=59)
    assert answers(desk, ask("early"))[0].reached is not None
    time.now += timedelta(seconds=1)
    assert answers(desk, ask("late"))[0].reached is None
    desk.close()


def test_the_holds_of_a_process_that_ended_end_with_it(database: Database) -> None:
    for writer in ("dead", "alive"):
        desk = HoldDesk(database, writer, Time(), answer_s=LONG_S)
        answers(desk, ask(f"of-{writer}", cost=40))
        desk.close()
    release_all(database, "dead")
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    assert answers(desk, ask())[0].used.held == Spend(40)
    desk.close()


def test_days_and_months_are_counted_apart(database: Database) -> None:
    time = Time()
    for days, cost in ((0, 1), (1, 20), (31, 300)):
        entries.write(database, [usage_record(ended_us=microseconds(NOON - timedelta(days=days)), cost=cost)])
    entries.write(database, [usage_record(key="other", cost=50_000)])
    desk = HoldDesk(database, "w", time, answer_s=LONG_S)
    (answer,) = answers(desk, ask(budget=Budget(cost_per_month=10**9)))
    assert (answer.used.day.cost, answer.used.month.cost) == (1, 21)  # NOON is on the 31st
    time.now += timedelta(days=1)
    (answer,) = answers(desk, ask("2", budget=Budget(cost_per_month=10**9)))
    assert (answer.used.day.cost, answer.used.month.cost, answer.used.held.cost) == (0, 0, 0)
    desk.close()


def test_what_the_database_does_not_know_counts_too(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    (answer,) = answers(desk, ask(unwritten=Spend(100)))
    assert answer.reached == Reached("day", True, 100, 0, 100)
    desk.close()


def test_a_hold_that_nobody_waits_for_any_more_is_released(database: Database) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    database.ping()

    async def leaves() -> None:
        with database.alone():  # the desk has to wait
            waiting = asyncio.create_task(desk.ask(ask("left")))
            await asyncio.sleep(0)
            eventually(lambda: desk._waiting.empty())
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(leaves())
    answers(desk, ask("next"))
    assert held(database) == 1
    desk.close()


def test_after_one_late_answer_nobody_waits_until_the_database_answers_in_time(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    desk = HoldDesk(database, "w", Time(), answer_s=0.3)
    database.ping()
    with database.alone():
        with pytest.raises(LedgerUnavailable, match=r"^No answer within 0.3 s\.$"):
            answers(desk, ask("late"))
        for name in "abc":
            with pytest.raises(LedgerUnavailable, match=r"^The database is away\.$"):
                answers(desk, ask(name))
    eventually(lambda: not desk.is_away)
    assert held(database) == 0  # also of the one that came late
    assert [record.getMessage() for record in caplog.records if record.name == "serve_app.ledger.holds"] == [
        "Ledger: each process counts budgets for itself, the database fails: No answer within 0.3 s.",
        "Ledger: the database counts budgets again.",
    ]
    desk.close()


def test_a_database_that_fails_is_said_to_all_who_wait_and_tried_again(tmp_path: Path) -> None:
    database = Database.of(f"sqlite:///{tmp_path / 'nowhere' / 'ledger.sqlite'}")
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    with pytest.raises(LedgerUnavailable, match="unable to open database file"):
        answers(desk, ask("1"), ask("2"))
    assert desk.is_away
    (tmp_path / "nowhere").mkdir()
    eventually(lambda: not desk.is_away)
    assert answers(desk, ask())[0].reached is None
    desk.close()
    database.close()


def test_the_thread_begins_with_the_first_question_and_ends_at_the_end(database: Database) -> None:
    before = set(threading.enumerate())
    desk = HoldDesk(database, "w", Time(), answer_s=LONG_S)
    assert set(threading.enumerate()) == before
    answers(desk, ask())
    desk.close()
    eventually(lambda: set(threading.enumerate()) <= before)


# --- several processes ---

FLOOD = """
import asyncio, sys
from datetime import UTC, datetime
from pathlib import Path
from serve_app.ledger.holds import Ask
from serve_app.ledger.record import microseconds
from serve_app.ledger.spend import Budget, Spend
from tests.support.ledger.usage_records import open_ledger, usage_record, written

async def request(ledger, name):
    ask = Ask(name, "test", Budget(cost_per_day=10_000), Spend(100), Spend(), 600)
    answer = await ledger.hold(ask)
    if answer.reached is None:
        await asyncio.sleep(0)
        ended_us = microseconds(datetime.now(UTC))
        ledger.append(usage_record(id=name, cost=70, ended_us=ended_us, is_held=True))
    return answer.reached is not None and answer.reached.is_spent

async def flood(ledger, who):
    for wave in range(1000):
        if all(await asyncio.gather(*(request(ledger, f"{who}-{wave}-{number}") for number in range(200)))):
            return
        written(ledger)

directory, url, who = sys.argv[1:]
with open_ledger(Path(directory), answer_s=60, url=url) as ledger:
    print("ready", flush=True)
    input()
    asyncio.run(flood(ledger, who))
    written(ledger)
"""


def test_a_flood_from_several_processes_passes_the_limit_by_less_than_one_request(
    tmp_path: Path, database_url: str, database: Database
) -> None:
    """200 requests at a time in each, which hold 100 and cost 70 each, and a limit of 10,000."""
    command = [sys.executable, "-c", FLOOD, str(tmp_path), database_url]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(number)], cwd=ROOT, **pipes) for number in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(120) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    spent = total(sum_up(database, ("key",), Range())).cost
    assert 10_000 <= spent < 10_000 + 70
    assert held(database) == 0


# --- the arithmetic ---

AMOUNTS = st.builds(Spend, st.integers(0, 50), st.integers(0, 50))
LIMITS = st.none() | st.integers(1, 50)
BUDGETS = st.builds(Budget, LIMITS, LIMITS, LIMITS, LIMITS)


@given(BUDGETS, AMOUNTS, AMOUNTS, AMOUNTS)
def test_a_request_may_begin_exactly_while_every_limit_has_something_left(
    budget: Budget, day: Spend, earlier: Spend, held: Spend
) -> None:
    used = Used(day, day + earlier, held)
    has_left = all(
        limit is None or spent < limit
        for limit, spent in (
            (budget.cost_per_day, used.day.cost + held.cost),
            (budget.cost_per_month, used.month.cost + held.cost),
            (budget.tokens_per_day, used.day.tokens + held.tokens),
            (budget.tokens_per_month, used.month.tokens + held.tokens),
        )
    )
    reached = budget.reached(used)
    assert (reached is None) == has_left
    if reached is not None:
        assert reached.spent + reached.held >= reached.limit
        assert reached.is_spent == (reached.spent >= reached.limit)


@given(BUDGETS, st.lists(st.tuples(AMOUNTS, AMOUNTS), max_size=30))
def test_one_request_at_most_goes_over_whatever_they_hold_and_cost(
    budget: Budget, requests: list[tuple[Spend, Spend]]
) -> None:
    """All begin before the first ends; each costs no more than it holds."""
    used, spent, dearest = Used(), Spend(), 0
    for most, less in requests:
        if budget.reached(used) is None:
            used = used.holding(budget.cap(most))
            cost = min(most.cost, less.cost)
            spent, dearest = spent + Spend(cost), max(dearest, cost)
    for limit in (budget.cost_per_day, budget.cost_per_month):
        assert limit is None or spent.cost < limit + max(dearest, 1)


@given(st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(lambda time: time.replace(tzinfo=UTC)))
def test_a_period_ends_at_midnight_utc(now: datetime) -> None:
    for period in ("day", "month"):
        end = now + timedelta(seconds=seconds_left(period, now))
        assert (end.hour, end.minute, end.second, end.microsecond) == (0, 0, 0, 0)
        before = end - timedelta(microseconds=1)
        assert (before.date() == now.date()) if period == "day" else (before.month == now.month and end.day == 1)
