"""Chooses the replica of a request: one that has its adapter and its prefix, unless that one has too much load.

`choose` is the whole policy; `AffinityRouter` calls it with Serve's data. Every ingress runs it without shared state.
Rendezvous hashing makes all of them choose the same replica, and losing a replica moves only its own keys.

Serve pickles this module by value, so it may import only installed packages.
"""

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.replicas import reports  # import the module: a value from it would be copied into the pickle


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running replica, for one request. `load`: its requests, including waiting ones. `capacity`: its limit of
    requests. `has_adapter`: the request's adapter is in its device slots. `is_ready`: it reports progress.
    """

    replica_id: str
    load: int = 0
    capacity: int = 1
    has_adapter: bool = False
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class Wish:
    """The preference of a request: the replica that ran its `affinity` before, with its `adapter`. `affinity`: prompt
    cache key or conversation; "" for none. `adapter`: its digest; "" for the base model. `request_id` breaks ties.
    """

    affinity: str
    adapter: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Patience:
    """The limit up to which a key stays on its replica: it moves when the replica has `least` requests and `factor`
    times the average load.
    """

    factor: float = 1.5
    least: int = 4


def choose(candidates: Sequence[Candidate], wish: Wish, patience: Patience) -> list[Candidate]:
    """All candidates, best first: free ones that hold the adapter, other free ones, busy ones, and last those that are
    not ready. Equal candidates are sorted by the key's hash order. Without a key, and for busy ones, the lower load
    comes first.
    """
    if not candidates:
        return []
    total = 1 + sum(candidate.load for candidate in candidates)
    busy_at = max(patience.least, math.ceil(patience.factor * total / len(candidates)))
    key = f"{wish.adapter}\0{wish.affinity}" if wish.affinity or wish.adapter else ""

    def rank(candidate: Candidate) -> tuple[bool, bool, bool, int, bytes]:
        is_free = candidate.load < min(busy_at, candidate.capacity)
        by_load = candidate.load if not (key and is_free) else 0
        score = _score(key or wish.request_id, candidate)
        return not candidate.is_ready, not is_free, not candidate.has_adapter, by_load, score

    return sorted(candidates, key=rank)


def _score(key: str, candidate: Candidate) -> bytes:
    return hashlib.blake2b(f"{key}\0{candidate.replica_id}".encode(), digest_size=8).digest()


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """`choose` as a Serve request router. A replica's report is in its routing stats (`serve_app/replica.py`)."""

    def initialize_state(self, capacity: int, load_factor: float, load_floor: int) -> None:
        self._capacity = capacity
        self._patience = Patience(load_factor, load_floor)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve's retry loop spins while all are full
        metadata = pending_request.metadata
        wish = Wish(metadata.session_id, metadata.multiplexed_model_id, metadata.internal_request_id)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        silent = reports.REPLICA_REPORTS.silent(self.app_name)
        candidates = [self._candidate(name, replica, wish, silent) for name, replica in replicas.items()]
        return [[replicas[candidate.replica_id]] for candidate in choose(candidates, wish, self._patience)]

    def _candidate(self, name: str, replica: RunningReplica, wish: Wish, silent: Collection[str]) -> Candidate:
        report = _report(replica)
        load = self.replica_queue_len_cache.get(replica.replica_id) or 0
        is_ready = report.is_ready and name not in silent
        return Candidate(name, load, self._capacity, wish.adapter in report.adapters, is_ready)

    def _publish(self) -> None:
        replicas = self.curr_replicas.values()
        said = {replica.replica_id.unique_id: _report(replica) for replica in replicas}
        reports.REPLICA_REPORTS.put(self.app_name, said)


def _report(replica: RunningReplica) -> reports.Report:
    return reports.Report.of(replica.routing_stats or {})
