"""The stages of a request's way through the service, with their times."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engines.interface.protocol import Timing


@dataclass(frozen=True, slots=True)
class Stage:
    """Times on the monotonic clock, in seconds."""

    name: str
    began_at: float
    ended_at: float


@dataclass(slots=True)
class Stages:
    """Those of one request, in the order in which they ended. Costs a few microseconds per request."""

    done: list[Stage] = field(default_factory=list)
    _called_at: float | None = None
    _answering_since: float | None = None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """A stage that lasts as long as the context, however it ends."""
        began_at = time.monotonic()
        try:
            yield
        finally:
            self._add(name, began_at, time.monotonic())

    def called(self) -> None:
        """A model was asked for tokens."""
        self._called_at = time.monotonic()

    def answers(self, timing: Timing | None) -> None:
        """The first tokens have come. `timing`: what the engine says about them. The rest of the time since the call is
        the way to a replica and back.
        """
        now = time.monotonic()
        called_at, self._called_at = self._called_at, None
        self._answering_since = now
        if called_at is None:
            return
        prefilled_from = now - timing.prefill_s if timing is not None else now
        queued_from = prefilled_from - timing.queued_s if timing is not None else now
        self._add("route", called_at, max(called_at, queued_from))
        if timing is not None:
            self._add("queue", max(called_at, queued_from), max(called_at, prefilled_from))
            self._add("prefill", max(called_at, prefilled_from), now)

    def end(self) -> None:
        """The request has ended, and with it the stages under way."""
        now = time.monotonic()
        if self._called_at is not None:
            self._add("route", self._called_at, now)
        if self._answering_since is not None:
            self._add("decode", self._answering_since, now)
        self._called_at = self._answering_since = None

    def _add(self, name: str, began_at: float, ended_at: float) -> None:
        self.done.append(Stage(name, began_at, ended_at))
