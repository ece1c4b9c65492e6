"""The router as Serve runs it, in an ingress, without the cluster."""

import asyncio
import itertools
from dataclasses import dataclass

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.request_router.common import PendingRequest

from serve_app.replicas.generation import on_replica
from serve_app.replicas.reports import REPLICA_REPORTS, Report
from serve_app.replicas.router import STATUS_METHOD, AffinityRouter
from serve_app.replicas.status import Load, Status

serials = itertools.count()


@dataclass(frozen=True)
class Running:
    """A replica, as far as the router reads it."""

    replica_id: ReplicaID


class Ingress:
    """A router with two replicas, a and b, of an application of its own."""

    def __init__(self) -> None:
        self.app = f"app-{next(serials)}"
        deployment = DeploymentID("engine", self.app)
        source = DeploymentHandleSource.REPLICA
        self.router = AffinityRouter(deployment, handle_source=source, use_replica_queue_len_cache=True)
        self.router.initialize_state(capacity=10, load_factor=1.1, load_floor=4)
        self.replicas = {name: Running(ReplicaID(name, deployment)) for name in "ab"}
        REPLICA_REPORTS.put(self.app, {name: Report() for name in "ab"})

    def choose(self, method: str = "run", session: str = "") -> list[str]:
        """The replicas for a call, best first."""
        return asyncio.run(self._choose(RequestMetadata("r", "r", call_method=method, session_id=session)))

    async def _choose(self, metadata: RequestMetadata) -> list[str]:
        ranks = await self.router.choose_replicas(list(self.replicas.values()), PendingRequest([], {}, metadata))
        return [replica.replica_id.unique_id for rank in ranks for replica in rank]

    def send(self, name: str, count: int = 1) -> None:
        for _ in range(count):
            self.router.on_send_request(self.replicas[name].replica_id)

    def end(self, name: str) -> None:
        self.router.on_request_completed(self.replicas[name].replica_id, "r")

    def tell(self, name: str, others: int) -> None:
        REPLICA_REPORTS.hear(Status(self.app, name, True, 7.0, Load(others=others), b""))


def test_a_call_to_a_certain_replica_goes_nowhere_else():
    ingress = Ingress()
    assert ingress.choose(STATUS_METHOD, "b") == ["b"]
    assert ingress.choose(STATUS_METHOD, "gone") == []


def test_a_request_for_one_replica_goes_nowhere_else_however_busy_it_is():
    ingress = Ingress()
    ingress.send("b", 10)
    for method in ("run", "generate"):
        assert ingress.choose(method, on_replica("b")) == ["b"]
        assert ingress.choose(method, on_replica("gone")) == []


def test_the_calls_of_this_ingress_count_from_when_they_are_sent_until_they_end():
    ingress = Ingress()
    for name in "ab":
        ingress.tell(name, others=3)
    ingress.send("a", 2)
    ingress.send("b")
    assert ingress.choose() == ["b", "a"]
    ingress.end("a")
    ingress.end("a")
    assert ingress.choose() == ["a", "b"]


def test_requests_of_other_ingresses_count_as_they_were_told():
    ingress = Ingress()
    ingress.send("a")
    ingress.tell("a", others=0)
    ingress.tell("b", others=2)
    assert ingress.choose() == ["a", "b"]
    ingress.tell("b", others=0)
    assert ingress.choose() == ["b", "a"]


def test_without_statuses_the_queue_lengths_of_serve_count():
    ingress = Ingress()
    ingress.router.on_new_queue_len_info(ingress.replicas["a"].replica_id, 3)
    ingress.router.on_new_queue_len_info(ingress.replicas["b"].replica_id, 2)
    assert ingress.choose() == ["b", "a"]
    ingress.tell("a", others=0)  # what was told replaces them
    assert ingress.choose() == ["a", "b"]


def test_a_call_that_ends_after_its_router_was_replaced_leaves_no_count_below_none():
    ingress = Ingress()
    ingress.end("a")
    ingress.send("a")
    for name in "ab":
        ingress.tell(name, others=0)
    assert ingress.choose() == ["b", "a"]
