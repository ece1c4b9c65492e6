"""Which replicas run, and what each said of itself last: written by the routers of Serve's handles, read by readiness.

The one process-wide value of the service. Serve builds a router itself, from a pickled copy of its class and JSON
arguments, so nothing can be handed to it; it reaches this module by name.

A report ages: a replica whose process is stopped or cut off says nothing, and its last report must not stand for ever.
Reports reach an ingress through Serve's controller, which may be silent itself. So ages are measured on a clock of the
controller's calls to this process (`controller_called`), and it stands still while there are none.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

BEAT_S = 2.0
"""How often a replica's report changes at least. Serve sends each change of one to all ingresses, so not more often."""

_LONGEST_GAP_S = 3.0  # between two calls of a controller that is well; more is not counted


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself, in Serve's routing stats.

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
        """From what `fields` made, perhaps in a replica of a newer version, which may say more. Empty: `UNHEARD`."""
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
        """Serve's controller has just called this process: it is there, and silence of a replica is the replica's."""
        with self._changing:
            now = self._clock()
            if self._called_at > -math.inf:
                self._controller_s += min(now - self._called_at, _LONGEST_GAP_S)
            self._called_at = now

    def put(self, app: str, reports: Mapping[str, Report]) -> None:
        """The last reports of all running replicas of an application, by replica id."""
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
        """None: nothing is known of the application (yet)."""
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
        """When the application last lost its last replica, in seconds of the monotonic clock; -inf if it never did."""
        known = self._apps.get(app)
        return known.emptied_at if known else -math.inf


REPLICA_REPORTS = ReplicaReports()
