"""Which replicas run, as far as this process knows: written by the routers of Serve's handles, read by readiness.

The one process-wide value of the service. Serve builds a router itself, from a pickled copy of its class and JSON
arguments, so nothing can be handed to it; it reaches this module by name.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One running replica. `is_ready`: its engine makes progress. `adapters`: digests in its device slots."""

    replica_id: str
    is_ready: bool
    adapters: Sequence[str]


@dataclass(frozen=True, slots=True)
class _App:
    replicas: tuple[ReplicaState, ...]
    emptied_at: float


class ReplicaReports:
    """The running replicas of each application. Updates replace whole values: readable from any thread."""

    def __init__(self) -> None:
        self._apps: MappingProxyType[str, _App] = MappingProxyType({})

    def put(self, app: str, replicas: tuple[ReplicaState, ...]) -> None:
        loses_last = bool(self.replicas(app)) and not replicas
        emptied_at = time.monotonic() if loses_last else self.emptied_at(app)
        self._apps = MappingProxyType({**self._apps, app: _App(replicas, emptied_at)})

    def replicas(self, app: str) -> tuple[ReplicaState, ...] | None:
        """None: nothing is known of the application (yet)."""
        known = self._apps.get(app)
        return known.replicas if known else None

    def emptied_at(self, app: str) -> float:
        """When the application last lost its last replica, in seconds of the monotonic clock; -inf if it never did."""
        known = self._apps.get(app)
        return known.emptied_at if known else -math.inf


REPLICA_REPORTS = ReplicaReports()
