"""What a request reserves of its key's tokens, and the bytes that requests hold."""

from contextlib import ExitStack

import pytest

from serve_app.access.limits import Lease, Limiter
from serve_app.base.errors import LimitReached, Overloaded
from tests.support.limiter_kit import Clock, caller


def reserved(leases: list[Lease], num_prompt: int, asked: int | None, most: int = 4000) -> int:
    """How many of them can reserve it."""
    count = 0
    for lease in leases:
        try:
            lease.reserve(num_prompt, asked, most)
        except LimitReached:
            continue
        count += 1
    return count


def test_requests_that_come_at_once_share_the_tokens_of_the_minute() -> None:
    limiter, who = Limiter(Clock()), caller(tokens_per_minute=1000)
    with ExitStack() as stack:
        leases = [stack.enter_context(limiter.admit(who)) for _ in range(256)]
        assert reserved(leases, 5, 95) == 10


def test_without_max_tokens_a_quarter_of_the_minute_is_reserved_at_most() -> None:
    limiter, who = Limiter(Clock()), caller(tokens_per_minute=1000)
    with ExitStack() as stack:
        leases = [stack.enter_context(limiter.admit(who)) for _ in range(20)]
        assert reserved(leases[:10], 0, None, most=100_000) == 4
    with ExitStack() as stack:
        leases = [stack.enter_context(limiter.admit(who)) for _ in range(20)]
        assert reserved(leases, 0, None, most=100) == 10


def test_what_is_not_used_comes_back_at_the_end_and_only_what_was_used_is_charged() -> None:
    limiter, who = Limiter(Clock()), caller(tokens_per_minute=1000)
    for _ in range(10):
        with limiter.admit(who) as lease:
            lease.reserve(50, 350, 350)
            lease.settle(60)
    with limiter.admit(who) as lease, pytest.raises(LimitReached) as refused:
        lease.reserve(1, 900, 900)
    assert str(refused.value) == "This key may use 1000 tokens per minute; this request needs 901, 400 are left."
    assert refused.value.retry_after_s == pytest.approx(501 * 60 / 1000)


def test_a_request_that_is_never_settled_is_not_charged() -> None:
    limiter, who = Limiter(Clock()), caller(tokens_per_minute=100)
    for _ in range(5):
        with limiter.admit(who) as lease:
            lease.reserve(10, 90, 90)
    with limiter.admit(who) as lease:
        lease.reserve(10, 90, 90)


def test_a_request_larger_than_a_minutes_worth_runs_once_the_bucket_is_full_and_is_repaid() -> None:
    clock = Clock()
    limiter, who = Limiter(clock), caller(tokens_per_minute=60)
    with limiter.admit(who) as lease:
        lease.reserve(100, 100, 100)
        lease.settle(180)
    clock.now += 119
    with pytest.raises(LimitReached), limiter.admit(who):
        pass
    clock.now += 2
    with limiter.admit(who) as lease:
        lease.reserve(1, 0, 0)


def test_a_request_that_finds_too_few_tokens_does_not_count_against_the_requests_of_the_minute() -> None:
    limiter, who = Limiter(Clock()), caller(tokens_per_minute=100, requests_per_minute=2)
    with limiter.admit(who) as first:
        first.reserve(50, 0, 0)
        for _ in range(5):
            with limiter.admit(who) as lease, pytest.raises(LimitReached):
                lease.reserve(60, 0, 0)
        with limiter.admit(who) as lease:
            lease.reserve(50, 0, 0)


@pytest.mark.parametrize("of_key", [True, False])
def test_a_request_that_finds_too_few_bytes_does_not_count_against_the_requests_of_the_minute(of_key: bool) -> None:
    limits = {"requests_per_minute": 2} | ({"bytes_in_flight": 100} if of_key else {})
    limiter, who, of_all = Limiter(Clock()), caller(**limits), None if of_key else 100
    with limiter.admit(who, bytes_in_flight=of_all) as first:
        first.hold(60)
        for _ in range(5):
            with limiter.admit(who, bytes_in_flight=of_all) as lease:
                for _ in range(2):
                    with pytest.raises(LimitReached if of_key else Overloaded):
                        lease.hold(60)
        with limiter.admit(who, bytes_in_flight=of_all) as lease:
            lease.hold(40)
        with pytest.raises(LimitReached), limiter.admit(who):
            pass


def test_the_requests_of_a_key_hold_so_many_bytes_and_give_them_back() -> None:
    limiter, who = Limiter(), caller(bytes_in_flight=100)
    with limiter.admit(who) as first:
        first.hold(60)
        with limiter.admit(who) as second, pytest.raises(LimitReached) as refused:
            second.hold(41)
        message = "The requests of this key may hold 100 bytes at a time; this one needs 41, the others hold 60."
        assert str(refused.value) == message
        with limiter.admit(who) as third, limiter.admit(caller("other", bytes_in_flight=100)) as other:
            third.hold(40)
            other.hold(100)
        first.hold(20)
        with limiter.admit(who) as fourth:
            fourth.hold(80)
    assert limiter.num_bytes == 0


def test_all_keys_together_hold_so_many_bytes_and_one_alone_is_let_in() -> None:
    limiter = Limiter()
    with limiter.admit(caller("a"), bytes_in_flight=100) as first:
        first.hold(200)
        with limiter.admit(caller("b"), bytes_in_flight=100) as second, pytest.raises(Overloaded):
            second.hold(1)
    with limiter.admit(caller("b"), bytes_in_flight=100) as second:
        second.hold(1)
