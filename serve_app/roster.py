"""Which replicas run, as far as this process knows: written by the routers of Serve's handles, read by readiness.

The one process-wide value of the service. Serve builds a router itself, from a pickled copy of its class and JSON
arguments, so nothing can be handed to it; it reaches this module by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One running replica. `is_ready`: its engine makes progress. `adapters`: digests in its device slots."""

    replica_id: str
    is_ready: bool
    adapters: Sequence[str]


class Roster:
    """The running replicas of each application. Updates replace whole values: readable from any thread."""

    def __init__(self) -> None:
        self._replicas: MappingProxyType[str, tuple[ReplicaState, ...]] = MappingProxyType({})

    def put(self, app: str, replicas: tuple[ReplicaState, ...]) -> None:
        self._replicas = MappingProxyType({**self._replicas, app: replicas})

    def replicas(self, app: str) -> tuple[ReplicaState, ...] | None:
        """None: nothing is known of the application (yet)."""
        return self._replicas.get(app)


ROSTER = Roster()
