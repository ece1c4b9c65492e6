"""The running replicas and the last report of each. Routers of Serve's handles write it; readiness reads it.

This is the only global value of the service. Serve builds a router from a pickled copy of its class and JSON arguments,
so no object can be passed to it. The router imports this module by name instead.

A report expires: a replica whose process is stopped or unreachable sends none, and its last report must not count any
longer. Reports reach an ingress through Serve's controller, which may stop too. So ages are measured on a clock that
the controller's calls to this process drive (`controller_called`). The clock stops while there are no calls.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

BEAT_S = 2.0
"""The interval at which a replica's report changes at least. Serve sends each change to all ingresses, so it is not
shorter.
"""

_LONGEST_GAP_S = 3.0  # the longest time between two calls of a healthy controller; longer gaps are not counted


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report, carried in Serve's routing stats.

    `is_ready`: its engine makes progress. `adapters`: digests in its device slots. `beat` changes every `BEAT_S`.
    `good_for_s`: a report that is older than this does not count.
    """

    is_ready: bool = True
    adapters: tuple[str, ...] = ()
    beat: int = 0
    good_for_s: float = math.inf

    def fields(self) -> dict[str, object]:
        """As Serve carries it."""
        return {
            "is_ready": self.is_ready,
            "adapters": self.adapters,
            "beat": self.beat,
            "good_for_s": self.good_for_s,
        }

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> "Report":
        """The inverse of `fields`. A replica of a newer version may send more fields. Empty: `UNHEARD`."""
        if not fields:
            return UNHEARD
        return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})  # type: ignore[arg-type]


UNHEARD = Report(good_for_s=10.0)
"""Of a replica that has not reported yet: it is ready, as its constructor has returned, but must report soon."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One running replica. `is_silent`: its last report is too old."""

    replica_id: str
    report: Report
    is_silent: bool = False

    @property
    def is_ready(self) -> bool:
        return self.report.is_ready and not self.is_silent


@dataclass(frozen=True, slots=True)
class _Heard:
    report: Report
    at: float  # on the clock of the controller's calls


@dataclass(frozen=True, slots=True)
class _App:
    replicas: Mapping[str, _Heard]
    emptied_at: float


class ReplicaReports:
    """The running replicas of each application. Updates replace whole values: readable from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._apps: MappingProxyType[str, _App] = MappingProxyType({})
        self._changing = threading.Lock()  # a router and the health check may run on different threads
        self._called_at = -math.inf
        self._controller_s = 0.0

    def controller_called(self) -> None:
        """Note a call of Serve's controller: it works, so a missing report is the replica's fault."""
        with self._changing:
            now = self._clock()
            if self._called_at > -math.inf:
                self._controller_s += min(now - self._called_at, _LONGEST_GAP_S)
            self._called_at = now

    def put(self, app: str, reports: Mapping[str, Report]) -> None:
        """Store the last reports of all running replicas of an application, by replica id."""
        with self._changing:
            known = self._apps.get(app)
            before = known.replicas if known else {}
            emptied_at = self._clock() if before and not reports else self.emptied_at(app)
            heard = {
                replica_id: before[replica_id]
                if replica_id in before and before[replica_id].report == report
                else _Heard(report, self._controller_s)
                for replica_id, report in reports.items()
            }
            self._apps = MappingProxyType({**self._apps, app: _App(heard, emptied_at)})

    def replicas(self, app: str) -> tuple[ReplicaState, ...] | None:
        """The running replicas. None: the application is not known (yet)."""
        known = self._apps.get(app)
        if known is None:
            return None
        return tuple(
            ReplicaState(replica_id, heard.report, self._controller_s - heard.at > heard.report.good_for_s)
            for replica_id, heard in known.replicas.items()
        )

    def silent(self, app: str) -> frozenset[str]:
        """The ids of the replicas whose last report is too old."""
        return frozenset(replica.replica_id for replica in self.replicas(app) or () if replica.is_silent)

    def emptied_at(self, app: str) -> float:
        """The time when the application last lost its last replica, in seconds of the monotonic clock; -inf if
        never.
        """
        known = self._apps.get(app)
        return known.emptied_at if known else -math.inf


REPLICA_REPORTS = ReplicaReports()
