"""Which models can produce a token: from what the replicas report, and from the controller where there are none.

Reading never waits and never calls a model, which would wake one that sleeps.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from serve_app.roster import Roster

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class AppStatus:
    """What Serve's controller says of an application and of its engine deployment, in Serve's words."""

    app: str
    engine: str
    running: int = 0

    @property
    def is_failed(self) -> bool:
        return "DEPLOY_FAILED" in (self.app, self.engine)

    @property
    def is_asleep(self) -> bool:
        """Whether having no replica is as it should be: there are none on purpose, or one is being woken up.

        A replica that just died is running, and its deployment healthy, until the controller notices.
        """
        return self.engine == "UPSCALING" or (self.engine in ("HEALTHY", "DOWNSCALING") and not self.running)


class ModelWatch:
    """The state of the applications that were added. `read_statuses` may block; it runs in a thread."""

    def __init__(self, roster: Roster, read_statuses: Callable[[], Mapping[str, AppStatus]]) -> None:
        self._roster = roster
        self._read_statuses = read_statuses
        self._apps: set[str] = set()
        self._statuses: Mapping[str, AppStatus] | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    def add(self, app: str) -> None:
        self._apps.add(app)

    def keep_only(self, apps: Collection[str]) -> None:
        """Forget the others: without replicas they would be asked about for ever."""
        self._apps.intersection_update(apps)

    def why_not_ready(self, app: str) -> str | None:
        """None if the model can produce a token now, or sleeps and would wake up for it."""
        replicas = self._roster.replicas(app)
        if replicas:
            return None if any(replica.is_ready for replica in replicas) else "its engine makes no progress"
        if self._statuses is None:
            return "its state is not known yet"
        status = self._statuses.get(app)
        if status is None:
            return "it is not deployed"
        if status.is_failed:
            return "it failed to deploy"
        return None if status.is_asleep else "no replica is up"

    def has_failed(self, app: str) -> bool:
        """Whether waiting is in vain."""
        status = None if self._statuses is None or self._roster.replicas(app) else self._statuses.get(app)
        return status is not None and status.is_failed

    def is_down(self, app: str) -> bool:
        """Whether there is no replica, and none is being woken up."""
        if self._roster.replicas(app):
            return False
        status = None if self._statuses is None else self._statuses.get(app)
        return status is None or not status.is_asleep

    async def _watch(self) -> None:
        while True:
            if all(self._roster.replicas(app) for app in self._apps):
                self._statuses = None  # once there is a need for them they are old
            else:
                try:
                    self._statuses = await asyncio.to_thread(self._read_statuses)
                except Exception:  # whatever Ray raises while its controller restarts: what was known still counts
                    logger.warning("The state of the models cannot be read.", exc_info=True)
            await asyncio.sleep(_INTERVAL_S)
