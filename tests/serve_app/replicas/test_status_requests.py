"""Which replicas an ingress asks for their status, and how often."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from serve_app.replicas.reports import ReplicaReports, Report
from serve_app.replicas.status import Load, Status
from serve_app.replicas.status_requests import StatusRequests
from tests.support.waiting import until


class Replicas:
    """Replicas that tell their status when asked, but for those that hang or fail."""

    def __init__(self, *names: str) -> None:
        self.reports = ReplicaReports()
        self.reports.put("m", {name: Report() for name in names})
        self.asked: Counter[str] = Counter()
        self.hanging: set[str] = set()
        self.failing: set[str] = set()
        self.cancelled: set[str] = set()

    async def ask(self, app: str, replica_id: str) -> None:
        self.asked[replica_id] += 1
        try:
            if replica_id in self.hanging:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.add(replica_id)
            raise
        if replica_id in self.failing:
            raise RuntimeError("lost")
        self.reports.hear(Status(app, replica_id, True, 7.0, Load(), b""))


@contextlib.asynccontextmanager
async def asking(replicas: Replicas) -> AsyncIterator[None]:
    requests = StatusRequests(replicas.reports, replicas.ask, look_s=0.001)
    try:
        yield
    finally:
        await requests.close()
        assert len(asyncio.all_tasks()) == 1


def test_every_running_replica_is_asked_once():
    async def main() -> None:
        replicas = Replicas("a", "b")
        async with asking(replicas):
            await until(lambda: not replicas.reports.unheard())
            replicas.reports.put("m", {name: Report() for name in "abc"})
            await until(lambda: not replicas.reports.unheard())
        assert replicas.asked == {"a": 1, "b": 1, "c": 1}

    asyncio.run(main())


def test_one_that_could_not_be_asked_is_asked_again():
    async def main() -> None:
        replicas = Replicas("a", "b")
        replicas.failing.add("a")
        async with asking(replicas):
            await until(lambda: replicas.asked["a"] > 3)
            replicas.failing.clear()
            await until(lambda: not replicas.reports.unheard())
        assert replicas.asked["b"] == 1

    asyncio.run(main())


def test_one_that_does_not_answer_is_asked_once_at_a_time_and_given_up_when_it_no_longer_runs():
    async def main() -> None:
        replicas = Replicas("a", "b")
        replicas.hanging.add("a")
        async with asking(replicas):
            await until(lambda: replicas.reports.unheard() == [("m", "a")])
            assert replicas.asked["a"] == 1
            replicas.reports.put("m", {"b": Report()})
            await until(lambda: replicas.cancelled)
            assert replicas.asked["a"] == 1

    asyncio.run(main())
