"""Decides which models can produce a token, from the replicas' reports and, where there is no replica, from the
controller.

The controller is asked only about models without replicas, and at most once a second, because each call costs it about
80 ms of CPU. Models are never called, because a call would start one that is scaled to zero.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from serve_app.replicas.reports import ReplicaReports, ReplicaState

logger = logging.getLogger(__name__)

_INTERVAL_S = 1.0
_PATIENCE_S = 0.8  # probes usually wait one second
_SILENT = "its replicas do not report"


@dataclass(frozen=True, slots=True)
class AppStatus:
    """The status of an application and of its engine deployment, as Serve's controller reports it."""

    app: str
    engine: str
    running: int = 0

    @property
    def is_failed(self) -> bool:
        return "DEPLOY_FAILED" in (self.app, self.engine)

    @property
    def is_loading(self) -> bool:
        """Whether new replicas are being started that are not ready yet."""
        return "DEPLOYING" in self.app or self.engine == "UPDATING"

    @property
    def is_asleep(self) -> bool:
        """Whether the application has no replica by design: it is scaled to zero, or its first replica is being
        started.

        Until the controller notices, a replica that just died counts as running, and its deployment as healthy.
        """
        return self.engine == "UPSCALING" or (self.engine in ("HEALTHY", "DOWNSCALING") and not self.running)


class ReadinessWatch:
    """The state of applications. `read_statuses` may block; it runs in a thread.

    `interval_s`: how long an answer of the controller counts as recent. `patience_s`: how long a caller waits for one.
    """

    def __init__(
        self,
        reports: ReplicaReports,
        read_statuses: Callable[[], Mapping[str, AppStatus]],
        *,
        interval_s: float = _INTERVAL_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._reports = reports
        self._read_statuses = read_statuses
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._statuses: Mapping[str, AppStatus] | None = None
        self._statuses_at = self._asked_at = -math.inf  # when it was asked for them, and when it was last asked
        self._asking: asyncio.Task[None] | None = None

    async def look(self, apps: Collection[str]) -> None:
        """Refresh the state of the applications without replicas. Returns at once if all have replicas. Returns after
        `patience_s` if the controller does not answer; then the old state is used.
        """
        deadline = time.monotonic() + self._patience_s
        while not self._is_recent(apps) and (left_s := deadline - time.monotonic()) > 0:
            if self._asking is None:
                self._asking = asyncio.get_running_loop().create_task(self._ask())
            await asyncio.wait([self._asking], timeout=left_s)

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            with suppress(asyncio.CancelledError):
                await self._asking

    def why_not_ready(self, app: str) -> str | None:
        """None if the model can produce a token now, or is scaled to zero and would start for a request."""
        replicas = self._reports.replicas(app)
        if replicas:
            return None if any(replica.is_ready for replica in replicas) else _why_none(replicas)
        if not self._is_known(app):
            return "its state is not known yet"
        status = self._status(app)
        if status is None:
            return "it is not deployed"
        if status.is_failed:
            return "it failed to deploy"
        if status.is_asleep:
            return None
        if status.is_loading:
            return "it is still being loaded"
        return _SILENT if status.running else "its replicas have ended"

    def running(self, app: str) -> tuple[str, ...]:
        """The ids of the replicas that make progress."""
        replicas = self._reports.replicas(app) or ()
        return tuple(replica.replica_id for replica in replicas if replica.is_ready and not replica.is_silent)

    def held(self, app: str) -> frozenset[bytes]:
        """The adapters in device slots of its replicas."""
        replicas = self._reports.replicas(app) or ()
        return frozenset[bytes]().union(*(replica.adapters for replica in replicas))

    def silent(self, app: str) -> frozenset[str]:
        """The replicas whose last report is too old."""
        return self._reports.silent(app)

    def has_failed(self, app: str) -> bool:
        """Whether the application has failed, so that waiting is useless."""
        status = self._status(app)
        return status is not None and status.is_failed

    def is_down(self, app: str) -> bool:
        """Whether there is no replica, and none is being started."""
        if self._reports.replicas(app):
            return False
        status = self._status(app)
        return status is None or not status.is_asleep

    def _is_known(self, app: str) -> bool:
        """Whether the controller was asked since the application lost its last replica."""
        return self._statuses is not None and self._statuses_at >= self._reports.emptied_at(app)

    def _status(self, app: str) -> AppStatus | None:
        if self._statuses is None or self._reports.replicas(app) or not self._is_known(app):
            return None
        return self._statuses.get(app)

    def _is_recent(self, apps: Collection[str]) -> bool:
        without = [app for app in apps if not self._reports.replicas(app)]
        if not without:
            return True
        emptied_at = max(self._reports.emptied_at(app) for app in without)
        return self._asked_at >= max(time.monotonic() - self._interval_s, emptied_at)

    async def _ask(self) -> None:
        asked_at = time.monotonic()
        try:
            self._statuses = await asyncio.to_thread(self._read_statuses)
            self._statuses_at = asked_at
        except Exception:  # Ray can raise any error while its controller restarts
            logger.warning("The controller's status of the models cannot be read.", exc_info=True)
        finally:
            self._asked_at, self._asking = asked_at, None


def _why_none(replicas: Sequence[ReplicaState]) -> str:
    """The reason for an application that has replicas but none that is ready."""
    silent = all(replica.is_silent for replica in replicas)
    return _SILENT if silent else "its engine makes no progress"
