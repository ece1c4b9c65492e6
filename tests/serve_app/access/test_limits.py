"""What one key may use."""

from contextlib import ExitStack

import pytest

from serve_app.access.auth import Caller
from serve_app.access.limits import Limiter
from serve_app.base.errors import LimitReached
from tests.support.limiter_kit import Clock, caller


def refused(limiter: Limiter, who: Caller) -> LimitReached:
    with pytest.raises(LimitReached) as caught, limiter.admit(who):
        pass
    return caught.value


def test_no_more_requests_run_at_a_time_than_allowed() -> None:
    limiter, who = Limiter(), caller(concurrency=2)
    with ExitStack() as running:
        running.enter_context(limiter.admit(who))
        running.enter_context(limiter.admit(who))
        assert str(refused(limiter, who)) == "This key may run 2 requests at a time; that many are running."
    with limiter.admit(who), limiter.admit(who):
        refused(limiter, who)


def test_a_request_that_fails_gives_its_place_back() -> None:
    limiter, who = Limiter(), caller(concurrency=1)
    with pytest.raises(ValueError, match="boom"), limiter.admit(who):
        raise ValueError("boom")
    with limiter.admit(who):
        refused(limiter, who)


def test_requests_per_minute_come_back_evenly() -> None:
    clock = Clock()
    limiter, who = Limiter(clock), caller(requests_per_minute=6)
    for _ in range(6):
        with limiter.admit(who):
            pass
    error = refused(limiter, who)
    assert str(error) == "This key may use 6 requests per minute; they are used up."
    assert error.retry_after_s == pytest.approx(10)
    clock.now += 10.001
    with limiter.admit(who):
        pass
    assert refused(limiter, who).retry_after_s == pytest.approx(10, abs=0.01)


def test_a_request_over_the_token_limit_is_let_finish_and_repaid() -> None:
    clock = Clock()
    limiter, who = Limiter(clock), caller(tokens_per_minute=600)
    with limiter.admit(who) as lease:
        lease.settle(900)
    error = refused(limiter, who)
    assert str(error) == "This key may use 600 tokens per minute; they are used up."
    assert error.retry_after_s == pytest.approx(30)
    clock.now += 31
    with limiter.admit(who):
        pass


def test_a_refused_request_uses_nothing() -> None:
    clock = Clock()
    limiter, who = Limiter(clock), caller(concurrency=1, requests_per_minute=2)
    with limiter.admit(who):
        for _ in range(5):
            refused(limiter, who)
    with limiter.admit(who):
        pass


def test_keys_do_not_share_their_limits() -> None:
    limiter = Limiter()
    other = caller("other", concurrency=1)
    with limiter.admit(caller(concurrency=1)), limiter.admit(other):
        refused(limiter, other)
