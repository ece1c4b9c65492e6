"""Which models are ready, down, asleep or failed."""

import asyncio
import threading
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from serve_app.replicas.readiness import AppStatus, ReadinessWatch
from serve_app.replicas.reports import ReplicaReports, Report
from serve_app.replicas.status import adapter_key, pack_adapters
from tests.support.replicas.report_clock import Clock, said

HEALTHY = AppStatus("RUNNING", "HEALTHY", running=1)
ASLEEP = AppStatus("RUNNING", "HEALTHY", running=0)
NONE: Mapping[str, Report] = MappingProxyType({})
READY = {"r1": Report()}
STUCK = {"r2": Report(is_ready=False)}


class Controller:
    """Answers what it is told to; counts how often it is asked."""

    def __init__(self, statuses=None) -> None:
        self.statuses = statuses or {}
        self.asked = 0
        self.error: Exception | None = None

    def read(self):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.statuses


async def looked(controller: Controller, replicas=None, **limits: float) -> tuple[ReadinessWatch, ReplicaReports]:
    reports = ReplicaReports()
    if replicas is not None:
        reports.put("m", replicas)
    watch = ReadinessWatch(reports, controller.read, **limits)
    await watch.look(["m"])
    return watch, reports


def state(status: AppStatus | None, replicas: Mapping[str, Report] = NONE) -> tuple[str | None, bool, bool]:
    watch, _ = asyncio.run(looked(Controller({"m": status} if status else {}), replicas))
    return watch.why_not_ready("m"), watch.is_down("m"), watch.has_failed("m")


def test_those_that_make_progress_take_requests_and_the_adapters_of_all_are_known():
    replicas = {
        "r1": Report(adapters=pack_adapters(["d1", "d2"])),
        "r2": Report(is_ready=False, adapters=pack_adapters(["d3"])),
        "r3": Report(adapters=pack_adapters(["d2"])),
    }
    watch, _ = asyncio.run(looked(Controller(), replicas))
    assert watch.running("m") == ("r1", "r3")
    assert watch.held("m") == {adapter_key(digest) for digest in ("d1", "d2", "d3")}
    assert (watch.running("unknown"), watch.held("unknown")) == ((), frozenset())


def test_a_model_is_ready_when_one_replica_makes_progress():
    assert state(None, STUCK | READY) == (None, False, False)


def test_a_model_whose_replicas_are_all_stuck_is_not_ready_but_not_down():
    assert state(None, STUCK) == ("its engine makes no progress", False, False)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, ("it is not deployed", True, False)),
        (AppStatus("DEPLOYING", ""), ("it is still being loaded", True, False)),
        (AppStatus("DEPLOYING", "UPDATING"), ("it is still being loaded", True, False)),
        (AppStatus("DEPLOY_FAILED", ""), ("it failed to deploy", True, True)),
        (AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED"), ("it failed to deploy", True, True)),
        (AppStatus("UNHEALTHY", "UNHEALTHY"), ("its replicas have ended", True, False)),
        (HEALTHY, ("its replicas do not report", True, False)),
        (AppStatus("RUNNING", "HEALTHY", running=0), (None, False, False)),
        (AppStatus("RUNNING", "UPSCALING", running=0), (None, False, False)),
    ],
)
def test_without_replicas_the_controller_says_why(status, expected):
    assert state(status) == expected


def test_a_model_whose_replicas_are_all_silent_is_not_ready_and_one_that_reports_is_enough():
    clock = Clock()
    reports = ReplicaReports(clock.now)
    watch = ReadinessWatch(reports, Controller().read)
    reports.put("m", {"r1": said(0), "r2": said(0)})
    clock.run(reports, 6.0)
    assert watch.why_not_ready("m") is None
    clock.run(reports, 2.0)
    assert watch.why_not_ready("m") == "its replicas do not report"
    assert not watch.is_down("m")
    assert watch.silent("m") == {"r1", "r2"}
    reports.put("m", {"r1": said(0), "r2": said(1)})
    assert watch.why_not_ready("m") is None
    assert watch.silent("m") == {"r1"}


def test_before_anything_is_known_a_model_is_not_ready():
    watch = ReadinessWatch(ReplicaReports(), Controller().read)
    assert watch.why_not_ready("m") == "its state is not known yet"
    assert watch.is_down("m")
    assert not watch.has_failed("m")


def test_a_failed_update_does_not_count_while_replicas_still_serve():
    assert state(AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED"), READY) == (None, False, False)


def test_the_controller_is_not_asked_while_replicas_are_up():
    controller = Controller()
    asyncio.run(looked(controller, READY))
    assert controller.asked == 0


def test_the_controller_is_asked_once_for_all_who_want_to_know_within_an_interval():
    async def main() -> None:
        controller = Controller({"m": ASLEEP, "n": ASLEEP})
        watch, _ = await looked(controller, interval_s=1e6)
        await asyncio.gather(*(watch.look(["m", "n"]) for _ in range(10)))
        assert controller.asked == 1
        assert watch.why_not_ready("n") is None

    asyncio.run(main())


def test_after_the_interval_the_controller_is_asked_again():
    async def main() -> None:
        controller = Controller({"m": ASLEEP})
        watch, _ = await looked(controller, interval_s=0, patience_s=0.05)
        assert watch.why_not_ready("m") is None
        controller.statuses = {"m": HEALTHY}
        await watch.look(["m"])
        assert watch.why_not_ready("m") == "its replicas do not report"

    asyncio.run(main())


def test_a_model_that_has_just_gone_to_sleep_is_ready_at_once():
    """What the controller said while it ran does not count, however new it is."""

    async def main() -> None:
        controller = Controller({"m": HEALTHY})
        watch, reports = await looked(controller, {}, interval_s=1e6)
        reports.put("m", READY)
        reports.put("m", {})
        controller.statuses = {"m": ASLEEP}
        assert watch.why_not_ready("m") == "its state is not known yet"
        await watch.look(["m"])
        assert watch.why_not_ready("m") is None

    asyncio.run(main())


def test_what_the_controller_said_before_the_replicas_came_does_not_count_once_they_die():
    async def main() -> None:
        watch, reports = await looked(Controller({"m": AppStatus("DEPLOY_FAILED", "DEPLOY_FAILED")}), {})
        assert watch.has_failed("m")
        reports.put("m", READY)
        reports.put("m", {})
        assert not watch.has_failed("m")
        assert watch.why_not_ready("m") == "its state is not known yet"

    asyncio.run(main())


def test_a_controller_that_does_not_answer_changes_nothing_that_was_known():
    async def main() -> None:
        controller = Controller({"m": ASLEEP})
        watch, _ = await looked(controller, {}, interval_s=0.01)
        controller.error = ConnectionError("the controller restarts")
        while controller.asked < 3:
            await watch.look(["m"])
        assert watch.why_not_ready("m") is None

    asyncio.run(main())


def test_nobody_waits_for_a_controller_that_hangs():
    hangs = threading.Event()

    async def main() -> None:
        watch = ReadinessWatch(ReplicaReports(), lambda: hangs.wait() and {"m": ASLEEP}, patience_s=0.05)
        await asyncio.gather(watch.look(["m"]), watch.look(["m"]))
        assert watch.why_not_ready("m") == "its state is not known yet"
        hangs.set()
        while watch.why_not_ready("m") is not None:
            await watch.look(["m"])

    asyncio.run(main())
