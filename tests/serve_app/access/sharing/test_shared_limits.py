"""Limits that hold over several ingresses: exactly when they have heard of each other, else within a bound."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.access.auth import Caller
from serve_app.access.limits import Limiter
from serve_app.access.sharing.board import SILENT_AFTER_S, Board, Hearing, Telling, Used
from serve_app.access.sharing.shared_limits import SharedLimits
from tests.support.limiter_kit import Clock, caller
from tests.support.limits_simulation import Ingresses, flood

KEY = caller(concurrency=3, requests_per_minute=6, tokens_per_minute=600)
MINUTE = caller(requests_per_minute=600)

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 3), st.integers(1, 300)),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 300)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.integers(1, 20)),
        st.tuples(st.just("exchange"), st.integers(0, 3), st.integers(0, 2)),
    ),
    max_size=40,
)


def all_know(count: int, who: Caller) -> Ingresses:
    """Ingresses that have all had a request of the key, long ago."""
    ingresses = Ingresses(count)
    ingresses.exchange()
    for ingress in range(count):
        assert ingresses.begin(ingress, who)
        ingresses.end(0)
        ingresses.exchange()
        ingresses.exchange()  # what the last told, the others hear before the minute has passed
        ingresses.clock.now += 60
    ingresses.exchange()
    ingresses.exchange()
    return ingresses


@settings(deadline=None, max_examples=60)
@given(EVENTS)
def test_ingresses_that_hear_of_each_other_decide_as_one_would(events: list[tuple[str, int, int]]) -> None:
    several, one = all_know(4, KEY), all_know(1, KEY)
    for what, which, amount in events:
        if what == "begin":
            assert several.begin(which, KEY, amount) == one.begin(0, KEY, amount)
        elif what == "end" and one.running:
            several.end(which, amount)
            one.end(which, amount)
        for _ in range(amount if what == "wait" else 1):
            several.clock.now += 2 * (what == "wait")
            one.clock.now += 2 * (what == "wait")
            several.exchange()
            several.exchange()  # what the last told, the others hear now


@settings(deadline=None)
@given(EVENTS)
def test_whatever_is_not_heard_the_excess_is_what_others_admitted_meanwhile(events: list[tuple[str, int, int]]) -> None:
    """Also when calls and replies are lost: each ingress alone keeps the limit, with what it has heard."""
    ingresses, lost = Ingresses(4), ("", "call", "reply")
    unheard = [0] * 4  # of each: requests of the others that began since it heard all of them
    for what, which, amount in events:
        if what == "begin" and ingresses.begin(which, KEY, amount):
            assert len(ingresses.running) <= 3 + unheard[which]
            unheard = [count + (ingress != which) for ingress, count in enumerate(unheard)]
        elif what == "end" and ingresses.running:
            ingresses.end(which, amount)
        elif what == "wait":
            ingresses.clock.now += amount / 20
        elif what == "exchange" and amount == 0:
            ingresses.exchange()
            ingresses.exchange()
            unheard = [0] * 4
        elif what == "exchange":
            ingresses.lost = lost[amount]
            ingresses.exchange(which)
            unheard[which] = 99  # it counts alone until it hears again
        assert all(sum(one.ingress == n for one in ingresses.running) <= 3 for n in range(4))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_flood_over_all_ingresses_gets_the_limit_and_what_comes_between_two_exchanges(count: int) -> None:
    ingresses = Ingresses(count)
    ingresses.exchange()
    minutes, per_s = 5, 40.0
    admitted = flood(ingresses, MINUTE, seconds=60 * minutes, per_s=per_s, period_s=0.2, seed=count)
    allowed = 600 * (1 + minutes)
    assert allowed - 15 <= admitted <= allowed + 2 * 0.2 * per_s


def test_without_exchanges_each_ingress_has_the_limit_for_itself() -> None:
    ingresses = Ingresses(2)
    admitted = flood(ingresses, MINUTE, seconds=60, per_s=60, period_s=1e9, seed=1)
    assert admitted > 600 * 2 * 1.4


def test_what_was_too_much_is_repaid() -> None:
    ingresses, limit = Ingresses(2), caller(requests_per_minute=60)
    ingresses.exchange()
    for ingress in (0, 1):
        assert all(ingresses.begin(ingress, limit) for _ in range(60))
    ingresses.end_all()
    ingresses.exchange()
    ingresses.exchange()
    ingresses.clock.now += 59
    assert not any(ingresses.begin(ingress, limit) for ingress in (0, 1))
    ingresses.clock.now += 3
    assert ingresses.begin(0, limit)


def test_a_key_that_others_used_before_has_their_debt_here_which_shrinks() -> None:
    ingresses, limit = Ingresses(2), caller(requests_per_minute=60)
    ingresses.exchange()
    for _ in range(30):  # for half an hour, at the limit
        for _ in range(60):
            ingresses.begin(0, limit)
        ingresses.end_all()
        ingresses.exchange()
        ingresses.clock.now += 60
    ingresses.exchange()
    assert sum(ingresses.begin(1, limit) for _ in range(100)) == 60
    ingresses.end_all()


def test_an_ingress_that_ends_takes_its_requests_with_it() -> None:
    ingresses, limit = Ingresses(2), caller(concurrency=1)
    ingresses.exchange()
    assert ingresses.begin(0, limit)
    ingresses.exchange()
    ingresses.exchange()
    assert not ingresses.begin(1, limit)
    ingresses.clock.now += SILENT_AFTER_S + 0.1
    ingresses.exchange(1)
    assert ingresses.begin(1, limit)


def test_a_new_board_knows_what_runs_and_charges_nothing_twice() -> None:
    ingresses, limit = Ingresses(2), caller(concurrency=4, requests_per_minute=10)
    ingresses.exchange()
    for ingress in (0, 0, 1):
        assert ingresses.begin(ingress, limit)
    ingresses.exchange()
    ingresses.exchange()
    ingresses.board = Board(ingresses.clock)
    ingresses.exchange()
    ingresses.exchange()
    assert ingresses.begin(0, limit)
    ingresses.exchange()
    ingresses.exchange()
    assert [ingresses.begin(ingress, limit) for ingress in (0, 1)] == [False, False]  # four run
    ingresses.end_all()
    ingresses.exchange()
    ingresses.exchange()
    for _ in range(6):
        assert ingresses.begin(1, limit)
        ingresses.end(0)
    assert not ingresses.begin(1, limit)  # ten in the minute


def test_an_ingress_that_starts_is_not_charged_for_what_was_before() -> None:
    ingresses, limit = Ingresses(2), caller(requests_per_minute=10)
    ingresses.exchange(0)
    assert ingresses.begin(0, limit)
    ingresses.exchange(0)
    ingresses.exchange(1)
    assert sum(ingresses.begin(1, limit) for _ in range(20)) == 10
    ingresses.end_all()


def test_a_board_tells_only_what_has_changed() -> None:
    board = Board(Clock())
    first = board.exchange(Telling("a", 1, {"k": Used(1, 1, 5), "l": Used(0, 2, 0)}))
    assert first.sums == {"k": Used(0, 1, 5), "l": Used(0, 2, 0)}
    again = board.exchange(Telling("a", 2, {"l": Used(0, 1, 0)}, first.epoch, first.version))
    assert again.sums == {"l": Used(0, 3, 0)}
    assert board.exchange(Telling("a", 3, {}, first.epoch, again.version)).sums == {}
    assert set(board.exchange(Telling("b", 1, {}, "of another board", 99)).sums) == {"k", "l"}


class Driven:
    """An ingress beside which another one runs requests of the key."""

    def __init__(self, *, period_s: float = 0.02) -> None:
        self.board, self.limiter = Board(), Limiter()
        self.works = True
        self.shared = SharedLimits(self.limiter, self.exchange, period_s=period_s)
        self._serial = 0

    async def exchange(self, telling: Telling) -> Hearing:
        if not self.works:
            await asyncio.Event().wait()
        return self.board.exchange(telling)

    def other_runs(self, running: int) -> None:
        self._serial += 1
        self.board.exchange(Telling("other", self._serial, {"k": Used(running)}))

    async def is_admitted(self, who: Caller) -> bool:
        await self.shared.hear_before_refusing(who)
        return not self.limiter.is_full_by_others(who)


def drive(test: Callable[[Driven], Awaitable[None]], **options: float) -> None:
    async def main() -> None:
        driven = Driven(**options)
        driven.shared.start()
        await asyncio.wait_for(test(driven), 20)
        await driven.shared.close()

    asyncio.run(main())


ONE = caller(concurrency=1)


def test_a_request_is_not_refused_for_one_that_ended_elsewhere_a_moment_ago() -> None:
    async def test(driven: Driven) -> None:
        driven.other_runs(1)
        await driven.shared.exchange()
        assert driven.limiter.is_full_by_others(ONE)
        driven.other_runs(0)
        assert await driven.is_admitted(ONE)

    drive(test)


def test_a_request_that_is_over_the_limit_waits_only_for_two_exchanges() -> None:
    async def test(driven: Driven) -> None:
        driven.other_runs(1)
        await driven.shared.exchange()
        began = asyncio.get_running_loop().time()
        assert not await driven.is_admitted(ONE)
        assert asyncio.get_running_loop().time() - began < 1

    drive(test)


def test_a_board_that_does_not_answer_refuses_nothing() -> None:
    async def test(driven: Driven) -> None:
        driven.other_runs(1)
        await driven.shared.exchange()
        driven.works = False
        while not await driven.is_admitted(ONE):  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.05)
        driven.works = True
        driven.other_runs(2)  # it lives
        while await driven.is_admitted(ONE):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)

    drive(test)


def test_only_so_many_requests_of_a_key_wait_to_hear() -> None:
    async def test(driven: Driven) -> None:
        driven.other_runs(1)
        await driven.shared.exchange()
        waits = [asyncio.ensure_future(driven.is_admitted(ONE)) for _ in range(200)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sum(not one.done() for one in waits) <= 32
        assert not any(await asyncio.gather(*waits))

    drive(test, period_s=0.1)


def test_the_only_ingress_asks_nobody() -> None:
    async def main() -> None:
        shared = SharedLimits(Limiter(), None)
        shared.start()
        await shared.hear_before_refusing(ONE)
        await shared.close()

    asyncio.run(main())
