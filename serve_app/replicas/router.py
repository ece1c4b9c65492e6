"""Chooses the replica of a request: one that has its adapter and its prefix, unless that one has too much load.

`choose` is the whole policy; `AffinityRouter` calls it with what the replicas told (`reports.py`). Every ingress runs
it without shared state. Rendezvous hashing makes all of them choose the same replica, and losing a replica moves only
its own keys.

Serve pickles this module by value, so it may import only installed packages.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from serve_app.replicas import reports  # import the module: a value from it would be copied into the pickle
from serve_app.replicas.rendezvous import Key
from serve_app.replicas.reports import ReplicaState
from serve_app.replicas.status import ON_REPLICA, adapter_key

STATUS_METHOD = "tell_status"
"""The replica's method that is called on one certain replica, whose id is the call's `session_id`."""

_KEYLESS_CHOICES = 8
"""How many replicas a request without a key compares. With more, all ingresses would send to the same lightest ones
until they hear of each other's requests.
"""


@dataclass(slots=True)  # not frozen, as that doubles the time to make one for each replica and request
class Candidate:
    """A running replica, for one request. `load`: its requests, including waiting ones. `queued_tokens`: tokens of its
    prompts that are not computed yet. `capacity`: its limit of requests. `has_adapter`: the request's adapter is in its
    device slots. `is_ready`: it reports progress. `is_cramped`: requests wait because its KV cache is almost full.
    """

    replica_id: str
    load: int = 0
    capacity: int = 1
    has_adapter: bool = False
    is_ready: bool = True
    queued_tokens: int = 0
    is_cramped: bool = False


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

    factor: float = 1.1
    least: int = 4


def choose(candidates: Sequence[Candidate], wish: Wish, patience: Patience) -> list[Candidate]:
    """All candidates, best first: free ones that hold the adapter, other free ones, busy ones, and last those that are
    not ready. Equal candidates are in the order of the key's rendezvous. Without a key, and for busy ones, the lower
    load comes first.

    Among the holders of an adapter the conversation decides. Which replica is the next to load it depends on the
    adapter, so that new conversations do not spread it, and all ingresses load it on the same ones.
    """
    busy_at = _busy_at(candidates, patience)
    own = Key(wish.adapter, wish.affinity or wish.request_id)
    home = Key(wish.adapter)
    holders = [candidate for candidate in candidates if candidate.has_adapter and candidate.is_ready]
    # Other ingresses see the same few places. Where fewer are left than holders, only that share of the conversations
    # takes one, and the others go to more replicas: so many that their requests do not meet on one either.
    room = sum(max(0, min(busy_at, holder.capacity) - holder.load) for holder in holders)
    takes_holder = room > len(holders) * own.score("")
    next_at_once = 1 + len(holders) // 2

    def rank(candidate: Candidate) -> tuple[bool, bool, int, int, int, float]:
        is_free = candidate.load < min(busy_at, candidate.capacity) and not candidate.is_cramped
        tier = 1 if not candidate.has_adapter else 0 if takes_holder else 2
        score = own.score(candidate.replica_id)
        if wish.adapter and tier == 1:
            place = home.score(candidate.replica_id)
            score = int(place * len(candidates) / next_at_once) + score if holders else place
        if is_free and (wish.affinity or wish.adapter):
            return not candidate.is_ready, False, tier, 0, 0, score
        if is_free and score * len(candidates) > _KEYLESS_CHOICES:
            tier = 3
        return not candidate.is_ready, not is_free, tier, candidate.load, candidate.queued_tokens, score

    return sorted(candidates, key=rank)


def _busy_at(candidates: Sequence[Candidate], patience: Patience) -> int:
    """The load from which a replica is busy. Rounded down, as several ingresses may send before they hear of each
    other, but above the average, so that one is free.
    """
    average = (1 + sum(candidate.load for candidate in candidates)) / max(1, len(candidates))
    return max(patience.least, int(patience.factor * average), int(average) + 1)


def candidate_of(replica: ReplicaState, adapter: bytes | None, *, own: int, queue: int, capacity: int) -> Candidate:
    """A replica as a candidate for a request with this adapter. `own`: requests that this process has there. `queue`:
    the queue length that Serve believes, which counts only while the replica does not tell its load.
    """
    load = replica.load
    if load is None:
        return Candidate(replica.replica_id, max(own, queue), capacity, adapter in replica.adapters, replica.is_ready)
    return Candidate(
        replica.replica_id,
        own + load.others,
        capacity,
        adapter in replica.adapters,
        replica.is_ready,
        load.queued_tokens,
        load.is_cramped,
    )


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray is not typed
    """`choose` as a Serve request router."""

    def initialize_state(self, capacity: int, load_factor: float, load_floor: int) -> None:
        self._capacity = capacity
        self._patience = Patience(load_factor, load_floor)
        self._ongoing: Counter[ReplicaID] = Counter()  # calls of this process that a replica has and has not ended

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._ongoing[replica_id] -= 1
        if self._ongoing[replica_id] <= 0:
            del self._ongoing[replica_id]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve's retry loop spins while all are full
        metadata = pending_request.metadata
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if metadata.call_method == STATUS_METHOD:
            return [[replicas[metadata.session_id]]] if metadata.session_id in replicas else []
        if metadata.session_id.startswith(ON_REPLICA):
            only = metadata.session_id.removeprefix(ON_REPLICA)
            return [[replicas[only]]] if only in replicas else []
        wish = Wish(metadata.session_id, metadata.multiplexed_model_id, metadata.internal_request_id)
        chosen = choose(self._candidates(replicas, wish), wish, self._patience)
        return [[replicas[candidate.replica_id]] for candidate in chosen]

    def _candidates(self, replicas: Mapping[str, RunningReplica], wish: Wish) -> list[Candidate]:
        states = {state.replica_id: state for state in reports.REPLICA_REPORTS.replicas(self.app_name) or ()}
        adapter = adapter_key(wish.adapter) if wish.adapter else None
        return [
            candidate_of(
                states.get(name) or ReplicaState(name),
                adapter,
                own=self._ongoing[replica.replica_id],
                queue=self.replica_queue_len_cache.get(replica.replica_id) or 0,
                capacity=self._capacity,
            )
            for name, replica in replicas.items()
        ]

    def _publish(self) -> None:
        replicas = self.curr_replicas.values()
        said = {replica.replica_id.unique_id: _report(replica) for replica in replicas}
        reports.REPLICA_REPORTS.put(self.app_name, said)


def _report(replica: RunningReplica) -> reports.Report:
    return reports.Report.of(replica.routing_stats or {})
