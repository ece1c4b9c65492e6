"""Asks every running replica to tell its status to this ingress, and again after its connection was lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.replicas.reports import ReplicaReports

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_ANSWER_TIMEOUT_S = 5.0

Ask = Callable[[str, str], Awaitable[None]]
"""Asks a replica, by its application and id. May raise anything, or wait without end."""


class StatusRequests:
    """Runs on the event loop that receives the statuses. `close` it."""

    def __init__(self, reports: ReplicaReports, ask: Ask, *, look_s: float = _LOOK_S) -> None:
        self._reports = reports
        self._ask = ask
        self._look_s = look_s
        self._calls: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._looking = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        for task in (self._looking, *self._calls.values()):
            task.cancel()
        await asyncio.gather(self._looking, *self._calls.values(), return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._reports.loop_ran()
            self._look()
            await asyncio.sleep(self._look_s)

    def _look(self) -> None:
        self._calls = {name: call for name, call in self._calls.items() if not call.done()}
        for name, call in self._calls.items():
            if not self._reports.is_running(*name):
                call.cancel()  # a call that waits for a replica would start a model that is scaled to zero
        for name in self._reports.unheard():
            if name not in self._calls:
                self._calls[name] = asyncio.get_running_loop().create_task(self._call(*name))

    async def _call(self, app: str, replica_id: str) -> None:
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._ask(app, replica_id)
        except Exception as exc:  # Ray can raise any error; the next look asks again
            logger.info("The replica %s of %s was not asked for its status: %r", replica_id, app, exc)
