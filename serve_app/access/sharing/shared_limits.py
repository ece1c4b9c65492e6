"""An ingress's end of the board: tells what its keys use, and charges its limits with what the others used."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress

from serve_app.access.auth import Caller
from serve_app.access.limits import Limiter
from serve_app.access.sharing.board import Hearing, Telling, Used

logger = logging.getLogger(__name__)

PERIOD_S = 0.2
"""The time between two exchanges. So long, and as long as an exchange takes, an ingress does not know of the others."""

_TIMEOUT_S = 1.0
_MOST_HELD = 32  # requests of one key that wait to hear

Exchange = Callable[[Telling], Awaitable[Hearing]]
"""Asks the board. May raise anything, or wait without end."""


class SharedLimits:
    """Runs on the event loop of the limiter. `close` it.

    No request waits for the board, but one that is over the limit of requests at a time only because of other
    ingresses: what they run may have ended since they told it.
    """

    def __init__(self, limiter: Limiter, exchange: Exchange | None, *, period_s: float = PERIOD_S) -> None:
        """`exchange` None: there is no other ingress."""
        self._limiter = limiter
        self._exchange = exchange
        self._period_s = period_s
        self._name = secrets.token_hex(8)
        self._telling = Telling(self._name, 0, {})
        self._is_told = True
        self._heard: dict[str, Used] = {}
        self._epoch = ""
        self._has_heard = asyncio.Event()
        self._held: dict[str, int] = {}
        self._is_deaf = False
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Exchange from now on, every `period_s`."""
        if self._exchange is not None:
            self._running = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with suppress(asyncio.CancelledError):
                await self._running

    async def hear_before_refusing(self, caller: Caller) -> None:
        """Return once the ingress has heard twice of the others, if the caller's request would be refused because of
        them: the first exchange may have begun before they told. Returns at once for others, and if too many wait.
        """
        name = caller.name
        if not self._limiter.is_full_by_others(caller) or self._held.get(name, 0) >= _MOST_HELD:
            return
        self._held[name] = self._held.get(name, 0) + 1
        try:
            async with asyncio.timeout(3 * self._period_s):
                for _ in range(2):
                    await self._has_heard.wait()
                    if not self._limiter.is_full_by_others(caller):
                        return
        except TimeoutError:
            return
        finally:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]

    async def exchange(self) -> None:
        """Tell what has changed, or what could not be told the last time, and hear. Raises what the board raises."""
        assert self._exchange is not None, "there is no other ingress"
        if self._is_told:
            told = self._telling
            self._telling = Telling(self._name, told.serial + 1, self._limiter.take_used(), told.epoch, told.version)
            self._is_told = False
        hearing = await asyncio.wait_for(self._exchange(self._telling), _TIMEOUT_S)
        told, self._is_told = self._telling, True
        self._telling = Telling(self._name, told.serial, {}, hearing.epoch, hearing.version)
        self._hear(hearing, told)

    def _hear(self, hearing: Hearing, told: Telling) -> None:
        """Charge what is new in the sums and not one's own. What an ingress finds on a board when it starts is past:
        it was not there to limit it. A board that is new to it holds only what it has not heard yet.
        """
        is_first = not self._epoch
        if hearing.epoch != self._epoch:
            self._epoch, self._heard = hearing.epoch, {}
            self._limiter.forget_others()
        if hearing.is_new:
            self._limiter.tell_again()
        for key, now in hearing.sums.items():
            before, own = self._heard.get(key, Used()), told.used.get(key, Used())
            requests, tokens = now.requests - before.requests - own.requests, now.tokens - before.tokens - own.tokens
            self._heard[key] = now
            self._limiter.hear(key, Used(now.running, *((0.0, 0.0) if is_first else (requests, tokens))))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._period_s)
            try:
                await self.exchange()
                self._is_deaf = False
            except Exception as exc:  # the board may be lost in any way; no request is refused for that
                self._limiter.forget_others()
                if not self._is_deaf:
                    logger.warning("Limits: other ingresses are not heard: %r", exc)
                self._is_deaf = True
            self._has_heard.set()
            self._has_heard.clear()
