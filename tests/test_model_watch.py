"""Which models are ready, down, asleep or failed."""

import asyncio
import contextlib
import threading

import pytest

from serve_app.model_watch import AppStatus, ModelWatch
from serve_app.roster import ReplicaState, Roster

HEALTHY = AppStatus("RUNNING", "HEALTHY", running=1)
READY = ReplicaState("r1", True, ())
STUCK = ReplicaState("r2", False, ())


class Controller:
    """Answers what it is told to; counts how often it is asked."""

    def __init__(self, statuses=None) -> None:
        self.statuses = statuses or {}
        self.asked = threading.Semaphore(0)
        self.error: Exception | None = None

    def read(self):
        self.asked.release()
        if self.error is not None:
            raise self.error
        return self.statuses


@contextlib.asynccontextmanager
async def watching(controller: Controller, replicas=None):
    roster = Roster()
    if replicas is not None:
        roster.put("m", replicas)
    watch = ModelWatch(roster, controller.read)
    watch.add("m")
    watch.start()
    if not replicas:
        await asyncio.to_thread(controller.asked.acquire)
        await asyncio.to_thread(lambda: None)  # the answer is back in the loop once a later one is
    yield watch, roster
    await watch.close()


def state(status: AppStatus | None, replicas=()) -> tuple[str | None, bool, bool]:
    async def main():
        async with watching(Controller({"m": status} if status else {}), replicas) as (watch, _):
            return watch.why_not_ready("m"), watch.is_down("m"), watch.has_failed("m")

    return asyncio.run(main())


def test_a_model_is_ready_when_one_replica_makes_progress():
    assert state(None, (STUCK, READY)) == (None, False, False)


def test_a_model_whose_replicas_are_all_stuck_is_not_ready_but_not_down():
    assert state(None, (STUCK,)) == ("its engine makes no progress", False, False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, ("it is not deployed", True, False)),
        (AppStatus("DEPLOYING", ""), ("no replica is up", True, False)),
        (AppStatus("DEPLOYING", "UPDATING"), ("no replica is up", True, False)),
        (AppStatus("DEPLOY_FAILED", ""), ("it failed to deploy", True, True)),
        (AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED"), ("it failed to deploy", True, True)),
        (AppStatus("UNHEALTHY", "UNHEALTHY"), ("no replica is up", True, False)),
        (HEALTHY, ("no replica is up", True, False)),
        (AppStatus("RUNNING", "HEALTHY", running=0), (None, False, False)),
        (AppStatus("RUNNING", "UPSCALING", running=0), (None, False, False)),
    ],
)
def test_without_replicas_the_controller_says_why(status, expected):
    assert state(status) == expected


def test_before_anything_is_known_a_model_is_not_ready():
    watch = ModelWatch(Roster(), Controller().read)
    assert watch.why_not_ready("m") == "its state is not known yet"
    assert watch.is_down("m")
    assert not watch.has_failed("m")


def test_a_failed_update_does_not_count_while_replicas_still_serve():
    assert state(AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED"), (READY,)) == (None, False, False)


def test_the_controller_is_not_asked_while_replicas_are_up():
    async def main() -> None:
        controller = Controller()
        async with watching(controller, (READY,)):
            await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)
        assert not controller.asked.acquire(blocking=False)

    asyncio.run(main())


async def until_unknown(watch: ModelWatch, roster: Roster, replicas) -> None:
    """Look, without giving the watch a turn, at what is known once there are no replicas."""
    async with asyncio.timeout(10):
        while True:
            roster.put("m", ())
            if watch.why_not_ready("m") == "its state is not known yet":
                return
            roster.put("m", replicas)
            await asyncio.sleep(0)


def test_what_the_controller_said_before_the_replicas_came_does_not_count_once_they_die(monkeypatch):
    monkeypatch.setattr("serve_app.model_watch._INTERVAL_S", 0.001)

    async def main() -> None:
        controller = Controller({"m": AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED")})
        async with watching(controller, ()) as (watch, roster):
            await asyncio.to_thread(controller.asked.acquire)
            assert watch.has_failed("m")
            await until_unknown(watch, roster, (READY,))
            assert not watch.has_failed("m")

    asyncio.run(main())


def test_an_application_that_left_the_catalogue_is_not_asked_about(monkeypatch):
    monkeypatch.setattr("serve_app.model_watch._INTERVAL_S", 0.001)

    async def main() -> None:
        async with watching(Controller({"m": HEALTHY}), ()) as (watch, roster):
            watch.keep_only({"n"})
            await until_unknown(watch, roster, ())

    asyncio.run(main())


def test_a_controller_that_does_not_answer_changes_nothing_that_was_known(monkeypatch):
    monkeypatch.setattr("serve_app.model_watch._INTERVAL_S", 0.001)

    async def main() -> None:
        controller = Controller({"m": AppStatus("RUNNING", "HEALTHY")})
        async with watching(controller, ()) as (watch, _):
            controller.error = ConnectionError("the controller restarts")
            for _ in range(3):
                await asyncio.to_thread(controller.asked.acquire)
            assert watch.why_not_ready("m") is None

    asyncio.run(main())
