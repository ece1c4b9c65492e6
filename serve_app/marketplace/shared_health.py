"""The health of an endpoint that several keys share: what the requests of one key may cause takes it from that key
alone.

A request that passes a limit of time or size says little: the upstream may hang, or the prompt may be too much for it.
So it cools the endpoint down for its own key. When the requests of several keys do so and no reply ends well between
them, it is the endpoint, which then cools down for all.
"""

import time
from collections.abc import Callable
from typing import Final

from serve_app.marketplace.health import Attempt, Health, HealthState

KEYS_THAT_TELL: Final = 3


class SharedHealth:
    """For one event loop. `clock`: seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_all = Health(clock)
        self._of_key: dict[str, Health] = {}  # of keys whose last requests passed a limit
        self._telling: set[str] = set()  # keys that told the same since a reply ended well

    def state_for(self, key: str) -> HealthState:
        """As the holder of this key finds it."""
        of_key = self._of_key.get(key)
        if of_key is None or self._of_all.state is not HealthState.UP:
            return self._of_all.state
        return of_key.state

    def is_available_for(self, key: str) -> bool:
        """Whether `begin` would allow a request."""
        return self._of_all.is_available and (key not in self._of_key or self._of_key[key].is_available)

    def begin(self, key: str) -> "SharedAttempt | None":
        """A request to the endpoint, which must end exactly once; None if this key must not ask it now."""
        if not self.is_available_for(key):
            return None
        of_all, known = self._of_all.begin(), self._of_key.get(key)
        assert of_all is not None
        return SharedAttempt(self, key, of_all, known.begin() if known is not None else None)

    def succeed(self, key: str) -> None:
        known = self._of_key.get(key)
        if known is not None and known.state is HealthState.UP:
            del self._of_key[key]

    def finish(self) -> None:
        self._telling.clear()

    def exceed(self, key: str, of_key: Attempt | None) -> bool:
        """Whether enough keys have told the same."""
        known = self._of_key.get(key)
        if known is None:
            known = self._of_key[key] = Health(self._clock)
            of_key = None
        known.fail(of_key or Attempt(known, 0), 0.0)
        self._telling.add(key)
        return len(self._telling) >= KEYS_THAT_TELL


class SharedAttempt:
    """A request of one key to an endpoint, and how it went."""

    def __init__(self, health: SharedHealth, key: str, of_all: Attempt, of_key: Attempt | None) -> None:
        self._health = health
        self._key = key
        self._of_all = of_all
        self._of_key = of_key

    def succeeded(self) -> None:
        """The endpoint sent its first byte, or refused the request for a fault of the caller."""
        self._of_all.succeeded()
        if self._of_key is not None:
            self._of_key.succeeded()
        self._health.succeed(self._key)

    def finished(self) -> None:
        """The reply ended well."""
        self._health.finish()

    def failed(self, retry_after_s: float = 0.0) -> None:
        """The endpoint failed, before its first byte or after it. `retry_after_s`: what it asked for."""
        self._of_all.failed(retry_after_s)

    def exceeded(self) -> None:
        """It passed a limit of time or size."""
        if self._health.exceed(self._key, self._of_key):
            self._of_all.failed()
        else:
            self._of_all.abandoned()

    def abandoned(self) -> None:
        """It tells nothing about the endpoint, as when the client leaves. May be called after the others too."""
        self._of_all.abandoned()
        if self._of_key is not None:
            self._of_key.abandoned()
