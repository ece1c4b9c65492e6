"""Several ingresses that share the limits of keys, in simulated time: the real limiters and board, no network."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from serve_app.access.auth import Caller
from serve_app.access.limits import Lease, Limiter
from serve_app.access.sharing.board import Board, Hearing, Telling
from serve_app.access.sharing.shared_limits import SharedLimits
from serve_app.base.errors import LimitReached
from tests.support.limiter_kit import Clock


class BoardLost(Exception):
    """The board does not answer."""


@dataclass
class Running:
    """A request that runs."""

    ingress: int
    lease: Lease
    stack: ExitStack


@dataclass
class Ingresses:
    """They exchange when a test says so. `lost`: "call" loses the next call, "reply" its reply."""

    count: int
    clock: Clock = field(default_factory=Clock)
    lost: str = ""

    def __post_init__(self) -> None:
        self.board = Board(self.clock)
        self.limiters = [Limiter(self.clock) for _ in range(self.count)]
        self.shared = [SharedLimits(limiter, self._exchange) for limiter in self.limiters]
        self.running: list[Running] = []

    async def _exchange(self, telling: Telling) -> Hearing:
        lost, self.lost = self.lost, ""
        if lost == "call":
            raise BoardLost
        hearing = self.board.exchange(telling)
        if lost == "reply":
            raise BoardLost
        return hearing

    def exchange(self, *ingresses: int) -> None:
        """Each of these, or all, tells and hears once."""

        async def run() -> None:
            for ingress in ingresses or range(self.count):
                try:
                    await self.shared[ingress].exchange()
                except BoardLost:
                    self.limiters[ingress].forget_others()

        asyncio.run(run())

    def begin(self, ingress: int, caller: Caller, num_tokens: int = 0) -> bool:
        """Whether a request may begin there; it then runs until it is ended."""
        stack = ExitStack()
        try:
            lease = stack.enter_context(self.limiters[ingress].admit(caller))
            if num_tokens:
                lease.reserve(num_tokens, 0, 0)
        except LimitReached:
            stack.close()
            return False
        self.running.append(Running(ingress, lease, stack))
        return True

    def end(self, index: int, num_tokens: int = 0) -> None:
        request = self.running.pop(index % len(self.running))
        request.lease.settle(num_tokens)
        request.stack.close()

    def end_all(self, num_tokens: int = 0) -> None:
        while self.running:
            self.end(0, num_tokens)


def flood(ingresses: Ingresses, caller: Caller, *, seconds: float, per_s: float, period_s: float, seed: int) -> int:
    """Requests of one key at random times and ingresses, far more than it may; how many were admitted. They end at
    once. Each ingress exchanges every `period_s`, at a time of its own.
    """
    rng = random.Random(seed)
    admitted, begun_at = 0, ingresses.clock.now
    due = [begun_at + rng.random() * period_s for _ in range(ingresses.count)]
    for at in _times(rng, begun_at, seconds, per_s):
        while min(due) <= at:
            first = due.index(min(due))
            ingresses.clock.now = due[first]
            due[first] += period_s
            ingresses.exchange(first)
        ingresses.clock.now = at
        if ingresses.begin(rng.randrange(ingresses.count), caller):
            admitted += 1
            ingresses.end(0)
    return admitted


def _times(rng: random.Random, begun_at: float, seconds: float, per_s: float) -> Iterator[float]:
    at = begun_at
    while (at := at + rng.expovariate(per_s)) < begun_at + seconds:
        yield at
