"""Whether an endpoint may be asked: after a failure it cools down, and then one request at a time probes it."""

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Final

FIRST_COOL_DOWN_S: Final = 30.0
LONGEST_COOL_DOWN_S: Final = 300.0


class HealthState(StrEnum):
    """What `GET /models/{slug}/endpoints` shows."""

    UP = "up"
    COOLING = "cooling"  # nothing is sent to it until the cool-down is over
    PROBING = "probing"  # the cool-down is over, and the next request or the one under way decides


class Health:
    """The health of one endpoint, for one event loop. `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0  # one after another
        self._cool_until = 0.0
        self._probe: Attempt | None = None
        self._number_of_failure = 0  # in all

    @property
    def state(self) -> HealthState:
        if not self._num_failures:
            return HealthState.UP
        return HealthState.COOLING if self._clock() < self._cool_until else HealthState.PROBING

    @property
    def is_available(self) -> bool:
        """Whether `begin` would allow a request."""
        state = self.state
        return state is HealthState.UP or (state is HealthState.PROBING and self._probe is None)

    @property
    def wait_s(self) -> float:
        """How long the cool-down still takes."""
        return max(0.0, self._cool_until - self._clock()) if self._num_failures else 0.0

    def begin(self) -> "Attempt | None":
        """A request to the endpoint, which must end exactly once; None if the endpoint must not be asked now."""
        if not self.is_available:
            return None
        attempt = Attempt(self, self._number_of_failure)
        if self._num_failures:
            self._probe = attempt
        return attempt

    def succeed(self, attempt: "Attempt") -> None:
        self.let_go(attempt)
        if attempt.number == self._number_of_failure:
            self._num_failures = 0

    def fail(self, attempt: "Attempt", retry_after_s: float) -> None:
        self.let_go(attempt)
        if attempt.number != self._number_of_failure:
            return  # it began before the last failure: many that fail together are one failure
        self._number_of_failure += 1
        self._num_failures += 1
        doubled = FIRST_COOL_DOWN_S * 2 ** min(self._num_failures - 1, 10)
        self._cool_until = self._clock() + min(LONGEST_COOL_DOWN_S, max(doubled, retry_after_s))

    def let_go(self, attempt: "Attempt") -> None:
        if self._probe is attempt:
            self._probe = None


class Attempt:
    """A request to an endpoint, and how it went. `number`: of the failure before it."""

    def __init__(self, health: Health, number: int) -> None:
        self._health = health
        self.number = number

    def succeeded(self) -> None:
        """The endpoint sent its first byte, or refused the request for a fault of the caller."""
        self._health.succeed(self)

    def failed(self, retry_after_s: float = 0.0) -> None:
        """The endpoint failed, before its first byte or after it. `retry_after_s`: what it asked for."""
        self._health.fail(self, retry_after_s)

    def abandoned(self) -> None:
        """It tells nothing about the endpoint, as when the client leaves. May be called after the others too."""
        self._health.let_go(self)
