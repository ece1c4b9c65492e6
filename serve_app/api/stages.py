"""The stages of a request's way through the service, with their times. They are kept only where requests are traced."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from engines.interface.protocol import Timing


class Stage(NamedTuple):
    """Times on the monotonic clock, in seconds."""

    name: str
    began_at: float
    ended_at: float


class Stages(Protocol):
    """Those of one request, in the order in which they ended."""

    @property
    def done(self) -> Sequence[Stage]: ...

    def during(self, name: str) -> AbstractContextManager[None]:
        """A stage that lasts as long as the context, however it ends."""

    def called(self) -> None:
        """A model was asked for tokens."""

    def answers(self, timing: Timing | None) -> None:
        """The first tokens have come. `timing`: what the engine says about them. The rest of the time since the call is
        the way to a replica and back.
        """

    def end(self) -> None:
        """The request has ended, and with it the stages under way."""


_NOTHING: Final = nullcontext()


class NoStages:
    """Of requests that are not traced: nothing is kept."""

    done: Sequence[Stage] = ()

    def during(self, name: str) -> AbstractContextManager[None]:
        del name
        return _NOTHING

    def called(self) -> None:
        pass

    def answers(self, timing: Timing | None) -> None:
        del timing

    def end(self) -> None:
        pass


NO_STAGES: Final = NoStages()


@dataclass(slots=True)
class TimedStages:
    """Of one request that may be traced."""

    done: list[Stage] = field(default_factory=list)
    _called_at: float | None = None
    _answering_since: float | None = None

    def during(self, name: str) -> AbstractContextManager[None]:
        return _During(self.done, name)

    def called(self) -> None:
        self._called_at = time.monotonic()

    def answers(self, timing: Timing | None) -> None:
        now = time.monotonic()
        called_at, self._called_at = self._called_at, None
        self._answering_since = now
        if called_at is None:
            return
        if timing is None:
            self._add("route", called_at, now)
            return
        prefilled_from = max(called_at, now - timing.prefill_s)
        queued_from = max(called_at, prefilled_from - timing.queued_s)
        self._add("route", called_at, queued_from)
        self._add("queue", queued_from, prefilled_from)
        self._add("prefill", prefilled_from, now)

    def end(self) -> None:
        now = time.monotonic()
        if self._called_at is not None:
            self._add("route", self._called_at, now)
        if self._answering_since is not None:
            self._add("decode", self._answering_since, now)
        self._called_at = self._answering_since = None

    def _add(self, name: str, began_at: float, ended_at: float) -> None:
        self.done.append(Stage(name, began_at, ended_at))


@dataclass(slots=True)
class _During:
    done: list[Stage]
    name: str
    began_at: float = 0.0

    def __enter__(self) -> None:
        self.began_at = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self.done.append(Stage(self.name, self.began_at, time.monotonic()))
