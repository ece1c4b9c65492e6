"""What the requests of one key cause takes an endpoint from that key alone; what several find takes it from all."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.marketplace.health import HealthState
from serve_app.marketplace.shared_health import KEYS_THAT_TELL, SharedAttempt, SharedHealth
from tests.support.marketplace.slugs import ManualClock


def begun(health: SharedHealth, key: str) -> SharedAttempt:
    attempt = health.begin(key)
    assert attempt is not None
    return attempt


def test_however_often_one_key_passes_a_limit_others_are_served() -> None:
    health = SharedHealth(clock := ManualClock())
    for wait_s in (30, 60, 120, 240, 300, 300):
        attempts = [begun(health, "slow") for _ in range(1 if wait_s > 30 else 9)]
        for attempt in attempts:
            attempt.exceeded()
        assert (health.state_for("slow"), health.begin("slow")) == (HealthState.COOLING, None)
        assert (health.state_for("other"), health.is_available_for("other")) == (HealthState.UP, True)
        clock.now += wait_s - 1
        assert not health.is_available_for("slow")
        clock.now += 1
        assert health.state_for("slow") is HealthState.PROBING


def test_its_own_cool_down_ends_with_its_next_first_byte() -> None:
    health = SharedHealth(clock := ManualClock())
    begun(health, "slow").exceeded()
    clock.now += 30
    probe = begun(health, "slow")
    assert health.begin("slow") is None  # one probes at a time
    probe.succeeded()
    assert health.state_for("slow") is HealthState.UP
    probe.exceeded()  # a long silence later
    assert health.state_for("slow") is HealthState.COOLING


def test_keys_that_find_the_same_take_it_from_all() -> None:
    health = SharedHealth(ManualClock())
    for number in range(KEYS_THAT_TELL):
        assert health.state_for("other") is HealthState.UP
        begun(health, str(number)).exceeded()
    assert (health.state_for("other"), health.begin("other")) == (HealthState.COOLING, None)


@pytest.mark.parametrize("by", ["0", "other"])
def test_a_reply_that_ends_well_shows_that_it_was_the_keys(by: str) -> None:
    health = SharedHealth(clock := ManualClock())
    for number in range(KEYS_THAT_TELL - 1):
        begun(health, str(number)).exceeded()
    clock.now += 30
    good = begun(health, by)
    good.succeeded(), good.finished()
    for number in range(KEYS_THAT_TELL - 1):
        begun(health, str(number + 5)).exceeded()
    assert health.state_for("other") is HealthState.UP


def test_a_slow_key_does_not_prolong_the_cool_down_of_all() -> None:
    health = SharedHealth(clock := ManualClock())
    begun(health, "other").failed()
    clock.now += 30
    begun(health, "slow").exceeded()
    begun(health, "other").succeeded()
    assert (health.state_for("other"), health.state_for("slow")) == (HealthState.UP, HealthState.COOLING)


STEPS = st.tuples(
    st.sampled_from(["begin", "succeeded", "finished", "failed", "exceeded", "abandoned", "wait"]), st.integers(0, 60)
)


@given(st.lists(STEPS, max_size=60))
def test_it_is_asked_as_its_state_says_and_one_key_alone_takes_nothing_from_another(
    steps: list[tuple[str, int]],
) -> None:
    health = SharedHealth(clock := ManualClock())
    open_attempts: list[SharedAttempt] = []
    for what, number in steps:
        if what == "wait":
            clock.now += number
        elif what == "begin":
            is_available = health.is_available_for("one")
            attempt = health.begin("one")
            assert (attempt is not None) == is_available
            open_attempts += [attempt] if attempt is not None else []
        elif open_attempts and what != "failed":
            attempt = open_attempts.pop(number % len(open_attempts))
            getattr(attempt, what)()
            attempt.abandoned()
        assert health.is_available_for("other")
        assert health.state_for("other") is HealthState.UP
