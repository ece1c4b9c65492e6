"""The running replicas and what each said last. Routers of Serve's handles and the side channel write it; routers and
readiness read it.

This is the only global value of the service. Serve builds a router from a pickled copy of its class and JSON arguments,
so no object can be passed to it. The router imports this module by name instead.

A replica tells its status to each ingress over the side channel (`status.py`). Serve's controller sends whatever a
replica tells it to all ingresses, for all replicas of the model at once. So a replica tells it next to nothing while
ingresses listen. Otherwise, as with `transport: serve`, its report there has everything but the load.

What was said expires: a replica whose process is stopped or unreachable says nothing, and its last word must not count
any longer. Each way has a clock of its own. Reports through Serve age with the controller's calls to this process
(`controller_called`), because the controller may stop too. Statuses age with this process's event loop (`loop_ran`).
Neither clock runs while nothing could arrive.
"""

import base64
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from serve_app.replicas.status import STATUS_BEAT_S, Load, Status, unpack_adapters

BEAT_S = 2.0
"""The interval at which a replica's report through Serve changes at least, while no ingress listens to the replica.
Serve sends each change to all ingresses, so it is not shorter.
"""

_CONTROLLER_GAP_S = 3.0  # the longest time between two calls of a healthy controller; longer gaps are not counted
_LOOP_GAP_S = 1.0  # the same between two turns of an event loop that is not blocked
_FRESH_S = 2.5 * STATUS_BEAT_S  # an older load is not used


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report, carried in Serve's routing stats.

    `is_ready`: its engine makes progress. `adapters`: those in its device slots, packed by `status.pack_adapters`.
    `beat` changes every `BEAT_S`. `good_for_s`: a report that is older than this does not count; infinite for a replica
    that tells its status to ingresses.
    """

    is_ready: bool = True
    adapters: bytes = b""
    beat: int = 0
    good_for_s: float = math.inf

    def fields(self) -> dict[str, object]:
        """As Serve carries it. Serve hashes the text of all fields often, and the text of bytes is long."""
        adapters = base64.b64encode(self.adapters).decode()
        return {"is_ready": self.is_ready, "held": adapters, "beat": self.beat, "good_for_s": self.good_for_s}

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "Report":
        """The inverse of `fields`. A replica of another version may send other fields. Empty: `UNHEARD`."""
        if not fields:
            return UNHEARD
        known = {name: fields[name] for name in cls.__slots__ if name in fields and name != "adapters"}
        return cls(**known, adapters=base64.b64decode(str(fields.get("held", ""))))  # type: ignore[arg-type]


UNHEARD = Report(good_for_s=10.0)
"""Of a replica that has not reported yet: it is ready, as its constructor has returned, but must report soon."""


@dataclass(slots=True)  # not frozen, as that doubles the time to make one for each replica and request
class ReplicaState:
    """One running replica. `is_silent`: what it said last is too old. `adapters`: the `adapter_key` of those in its
    device slots. `load`: None if it is not known, or too old.
    """

    replica_id: str
    makes_progress: bool = True
    is_silent: bool = False
    adapters: frozenset[bytes] = frozenset()
    load: Load | None = None

    @property
    def is_ready(self) -> bool:
        return self.makes_progress and not self.is_silent


class _Clock:
    """Counts the time between ticks, but of a long gap only the beginning."""

    def __init__(self, longest_gap_s: float) -> None:
        self.now_s = 0.0
        self._longest_gap_s = longest_gap_s
        self._ticked_at = -math.inf

    @property
    def has_started(self) -> bool:
        return self._ticked_at > -math.inf

    def tick(self, at: float) -> None:
        if self.has_started:
            self.now_s += min(at - self._ticked_at, self._longest_gap_s)
        self._ticked_at = at


@dataclass(slots=True)
class _Replica:
    """What one replica said: `report` at `reported_s` of the controller's clock, `status` at `told_s` of the loop's.
    Before its first status, `told_s` is when this process learned of the replica.
    """

    report: Report
    adapters: frozenset[bytes]
    reported_s: float
    told_s: float
    status: Status | None = None

    @property
    def told_good_for_s(self) -> float:
        return UNHEARD.good_for_s if self.status is None else self.status.good_for_s


@dataclass(frozen=True, slots=True)
class _App:
    replicas: Mapping[str, _Replica]
    emptied_at: float


class ReplicaReports:
    """The running replicas of each application. Thread-safe: routers and the side channel may run on different threads.

    Until the first `loop_ran`, only reports through Serve count: this process does not listen to the side channel.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._apps: MappingProxyType[str, _App] = MappingProxyType({})
        self._changing = threading.Lock()
        self._controller = _Clock(_CONTROLLER_GAP_S)
        self._loop = _Clock(_LOOP_GAP_S)

    def controller_called(self) -> None:
        """Note a call of Serve's controller: it works, so a missing report is the replica's fault."""
        with self._changing:
            self._controller.tick(self._clock())

    def loop_ran(self) -> None:
        """Note a turn of the event loop that receives statuses: it works, so a missing one is the replica's fault."""
        with self._changing:
            self._loop.tick(self._clock())

    def put(self, app: str, reports: Mapping[str, Report]) -> None:
        """Store the last reports of all running replicas of an application, by replica id."""
        with self._changing:
            known = self._apps.get(app)
            before = known.replicas if known else {}
            emptied_at = self._clock() if before and not reports else self.emptied_at(app)
            replicas = {name: self._reported(before.get(name), report) for name, report in reports.items()}
            self._apps = MappingProxyType({**self._apps, app: _App(replicas, emptied_at)})

    def hear(self, status: Status) -> None:
        """Store what a replica told over the side channel. Ignored unless Serve says that it is running."""
        with self._changing:
            replica = self._replica(status.app, status.replica_id)
            if replica is None:
                return
            if status.adapters is not None:
                replica.adapters = unpack_adapters(status.adapters)
            replica.status, replica.told_s = status, self._loop.now_s

    def unheard(self) -> list[tuple[str, str]]:
        """The application and id of each running replica that does not tell its status."""
        return [
            (app, replica_id)
            for app, known in self._apps.items()
            for replica_id, replica in known.replicas.items()
            if not self._tells(replica)
        ]

    def is_running(self, app: str, replica_id: str) -> bool:
        return self._replica(app, replica_id) is not None

    def replicas(self, app: str) -> tuple[ReplicaState, ...] | None:
        """The running replicas. None: the application is not known (yet)."""
        known = self._apps.get(app)
        if known is None:
            return None
        return tuple(self._state(replica_id, replica) for replica_id, replica in known.replicas.items())

    def silent(self, app: str) -> frozenset[str]:
        """The ids of the replicas whose last word is too old."""
        return frozenset(replica.replica_id for replica in self.replicas(app) or () if replica.is_silent)

    def emptied_at(self, app: str) -> float:
        """The time when the application last lost its last replica, in seconds of the monotonic clock; -inf if
        never.
        """
        known = self._apps.get(app)
        return known.emptied_at if known else -math.inf

    def _replica(self, app: str, replica_id: str) -> _Replica | None:
        known = self._apps.get(app)
        return None if known is None else known.replicas.get(replica_id)

    def _reported(self, before: _Replica | None, report: Report) -> _Replica:
        if before is None:
            adapters = unpack_adapters(report.adapters)
            return _Replica(report, adapters, self._controller.now_s, self._loop.now_s)
        if report != before.report:
            if not self._tells(before):
                before.adapters = unpack_adapters(report.adapters)
            before.report, before.reported_s = report, self._controller.now_s
        return before

    def _tells(self, replica: _Replica) -> bool:
        return replica.status is not None and self._loop.now_s - replica.told_s <= _FRESH_S

    def _state(self, replica_id: str, replica: _Replica) -> ReplicaState:
        status, is_silent = replica.status, self._is_silent(replica)
        if status is None or not self._tells(replica):
            return ReplicaState(replica_id, replica.report.is_ready, is_silent, replica.adapters)
        return ReplicaState(replica_id, status.is_ready, is_silent, replica.adapters, status.load)

    def _is_silent(self, replica: _Replica) -> bool:
        good_for_s = replica.report.good_for_s
        is_unreported = self._controller.now_s - replica.reported_s > good_for_s
        if not self._loop.has_started:
            return is_unreported
        # A replica that tells its status reports nothing through Serve that could become too old.
        is_untold = self._loop.now_s - replica.told_s > replica.told_good_for_s
        return is_untold and (is_unreported or math.isinf(good_for_s))


REPLICA_REPORTS = ReplicaReports()
