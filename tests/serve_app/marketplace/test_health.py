"""An endpoint that failed cools down, longer each time, and is then probed by one request at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.marketplace.health import Attempt, Health, HealthState


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def failed(clock: Clock, times: int = 1) -> Health:
    health = Health(clock)
    for _ in range(times):
        clock.now += health.wait_s
        begun(health).failed()
    return health


def begun(health: Health) -> Attempt:
    attempt = health.begin()
    assert attempt is not None
    return attempt


@pytest.mark.parametrize(("times", "wait_s"), [(1, 30), (2, 60), (3, 120), (4, 240), (5, 300), (6, 300), (40, 300)])
def test_each_failure_doubles_the_cool_down_up_to_five_minutes(times: int, wait_s: float) -> None:
    assert failed(Clock(), times).wait_s == wait_s


@pytest.mark.parametrize(("asked_s", "wait_s"), [(0, 30), (7, 30), (45, 45), (1e9, 300)])
def test_the_upstream_may_ask_for_a_longer_cool_down_within_bounds(asked_s: float, wait_s: float) -> None:
    health = Health(Clock())
    begun(health).failed(asked_s)
    assert health.wait_s == wait_s


def test_nothing_is_sent_until_the_cool_down_is_over() -> None:
    health = failed(clock := Clock())
    clock.now += 29.9
    assert (health.state, health.is_available, health.begin()) == (HealthState.COOLING, False, None)
    clock.now += 0.1
    assert (health.state, health.is_available) == (HealthState.PROBING, True)


def test_then_exactly_one_request_probes_it() -> None:
    health = failed(clock := Clock())
    clock.now += 30
    probe = begun(health)
    assert [health.begin() for _ in range(3)] == [None] * 3
    assert (health.state, health.is_available) == (HealthState.PROBING, False)
    probe.succeeded()
    assert (health.state, health.is_available, health.wait_s) == (HealthState.UP, True, 0)
    begun(health).failed()
    assert health.wait_s == 30  # as after a first failure


def test_a_probe_that_tells_nothing_makes_way_for_the_next() -> None:
    health = failed(clock := Clock())
    clock.now += 30
    begun(health).abandoned()
    assert health.state is HealthState.PROBING
    probe = begun(health)
    probe.failed()
    probe.abandoned()
    assert health.wait_s == 60


def test_many_requests_that_fail_together_are_one_failure() -> None:
    health = Health(Clock())
    attempts = [begun(health) for _ in range(32)]
    for attempt in attempts:
        attempt.failed()
    assert health.wait_s == 30


def test_a_reply_that_began_before_the_failure_does_not_end_the_cool_down() -> None:
    health = Health(Clock())
    before = begun(health)
    begun(health).failed()
    before.succeeded()
    assert health.state is HealthState.COOLING


def test_a_reply_that_is_lost_after_its_first_byte_cools_the_endpoint_down() -> None:
    health = failed(clock := Clock())
    clock.now += 30
    probe = begun(health)
    probe.succeeded()
    probe.failed()
    assert health.wait_s == 30


@given(st.lists(st.tuples(st.sampled_from(["begin", "succeed", "fail", "abandon", "wait"]), st.integers(0, 60))))
def test_whatever_happens_it_is_asked_as_its_state_says(steps: list[tuple[str, int]]) -> None:
    health, open_attempts = Health(clock := Clock()), list[Attempt]()
    probes: list[Attempt] = []
    for what, number in steps:
        if what == "wait":
            clock.now += number
        elif what == "begin":
            state, is_available = health.state, health.is_available
            attempt = health.begin()
            assert (attempt is not None) == is_available
            assert is_available == (state is HealthState.UP or (state is HealthState.PROBING and not probes))
            open_attempts += [attempt] if attempt is not None else []
            probes += [attempt] if attempt is not None and state is HealthState.PROBING else []
        elif open_attempts:
            attempt = open_attempts.pop(number % len(open_attempts))
            {"succeed": attempt.succeeded, "fail": attempt.failed, "abandon": attempt.abandoned}[what]()
            probes = [probe for probe in probes if probe is not attempt]
        assert len(probes) <= 1
        assert 0 <= health.wait_s <= 300
