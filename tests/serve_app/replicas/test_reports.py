"""How old a replica's report may be, and on which clock."""

import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle

from serve_app.replicas import router
from serve_app.replicas.reports import ReplicaReports, ReplicaState, Report
from serve_app.replicas.status import Load, Status, adapter_key, pack_adapters, unpack_adapters
from tests.support.replicas.report_clock import Clock, said


def made() -> tuple[Clock, ReplicaReports]:
    clock = Clock()
    return clock, ReplicaReports(clock.now)


def test_a_replica_that_has_not_reported_for_as_long_as_its_report_is_good_is_silent():
    clock, reports = made()
    reports.put("m", {"a": said(0), "b": said(0)})
    for beat in range(1, 8):
        clock.run(reports, 1.0)
        reports.put("m", {"a": said(0), "b": said(beat)})
        assert not reports.silent("m")
    clock.run(reports, 1.0)
    assert reports.silent("m") == {"a"}
    assert [(replica.replica_id, replica.is_ready) for replica in reports.replicas("m") or ()] == [
        ("a", False),
        ("b", True),
    ]


def test_a_silent_replica_that_reports_again_is_ready_again():
    clock, reports = made()
    reports.put("m", {"a": said(0)})
    clock.run(reports, 20.0)
    assert reports.silent("m") == {"a"}
    reports.put("m", {"a": said(1)})
    assert not reports.silent("m")


def test_the_same_report_brought_again_is_not_news():
    clock, reports = made()
    for _ in range(10):
        reports.put("m", {"a": said(0)})
        clock.run(reports, 1.0)
    assert reports.silent("m") == {"a"}


def test_while_the_controller_is_away_no_report_ages():
    clock, reports = made()
    reports.put("m", {"a": said(0)})
    clock.run(reports, 2.0)
    clock.time_s += 600.0
    assert not reports.silent("m")
    clock.run(reports, 1.0)  # its first calls: replicas' reports come right after them
    assert not reports.silent("m")
    clock.run(reports, 5.0)
    assert reports.silent("m") == {"a"}


def test_before_its_first_report_a_replica_is_ready_but_not_for_long():
    clock, reports = made()
    reports.put("m", {"a": Report.of({})})
    clock.run(reports, 10.0)
    assert [replica.is_ready for replica in reports.replicas("m") or ()] == [True]
    clock.run(reports, 1.0)
    assert reports.silent("m") == {"a"}
    reports.put("m", {"a": said(0)})
    assert not reports.silent("m")


def test_a_report_survives_the_way_through_serve_and_a_replica_of_another_version_may_say_something_else():
    report = Report(is_ready=False, adapters=pack_adapters(["d"]), beat=7, good_for_s=5.0)
    assert Report.of(report.fields()) == report
    assert Report.of({**report.fields(), "load": 3}) == report
    older = {"is_ready": True, "adapters": ("d",)}
    assert (Report.of(older).good_for_s, Report.of(older).adapters) == (math.inf, b"")


digests = st.lists(st.text(max_size=70), max_size=20)


@given(digests, st.randoms())
def test_the_report_depends_on_the_set_of_adapters_and_not_on_the_order_of_their_use(held, random):
    again = held + held[:3]
    random.shuffle(again)
    assert Report(adapters=pack_adapters(again)).fields() == Report(adapters=pack_adapters(held)).fields()
    assert unpack_adapters(pack_adapters(held)) == {adapter_key(digest) for digest in held}


def test_256_adapters_take_less_than_3_kb():
    held = [f"{n:064x}" for n in range(256)]
    assert len(str(Report(adapters=pack_adapters(held)).fields())) < 3000


def told(replica_id: str = "a", *, adapters: bytes | None = b"", is_ready: bool = True, others: int = 3) -> Status:
    return Status("m", replica_id, is_ready, 7.0, Load(others=others), adapters)


def listening() -> tuple[Clock, ReplicaReports]:
    """Two replicas that report nothing but readiness through Serve, and an ingress that listens to both."""
    clock, reports = made()
    reports.loop_ran()
    reports.put("m", {"a": Report(), "b": Report()})
    return clock, reports


def pass_time(clock: Clock, reports: ReplicaReports, seconds: float) -> None:
    for _ in range(int(2 * seconds)):
        clock.time_s += 0.5
        reports.loop_ran()


def states(reports: ReplicaReports) -> dict[str, ReplicaState]:
    return {state.replica_id: state for state in reports.replicas("m") or ()}


def test_a_load_counts_while_it_is_fresh():
    clock, reports = listening()
    reports.hear(told(others=3))
    pass_time(clock, reports, 2.5)
    assert states(reports)["a"].load == Load(others=3)
    pass_time(clock, reports, 0.5)
    assert states(reports)["a"].load is None
    reports.hear(told(others=4))
    assert states(reports)["a"].load == Load(others=4)
    assert states(reports)["b"].load is None


def test_adapters_that_are_not_told_again_stay():
    _, reports = listening()
    reports.hear(told(adapters=pack_adapters(["d"])))
    reports.hear(told(adapters=None))
    assert states(reports)["a"].adapters == {adapter_key("d")}
    reports.hear(told(adapters=b""))
    assert states(reports)["a"].adapters == frozenset()


def test_adapters_that_are_told_are_newer_than_those_reported_through_serve():
    clock, reports = listening()
    reports.hear(told(adapters=pack_adapters(["told"])))
    reports.put("m", {"a": Report(adapters=pack_adapters(["reported"])), "b": Report()})
    assert states(reports)["a"].adapters == {adapter_key("told")}
    pass_time(clock, reports, 4)
    reports.put("m", {"a": Report(beat=1, adapters=pack_adapters(["reported"])), "b": Report()})
    assert states(reports)["a"].adapters == {adapter_key("reported")}


def test_progress_is_told_at_once():
    _, reports = listening()
    reports.hear(told(is_ready=False))
    assert not states(reports)["a"].is_ready
    reports.hear(told())
    assert states(reports)["a"].is_ready


def test_a_replica_that_stops_telling_is_silent_and_one_that_never_told_is_so_after_ten_seconds():
    clock, reports = listening()
    reports.hear(told("a"))
    pass_time(clock, reports, 7)
    assert not reports.silent("m")
    pass_time(clock, reports, 1)
    assert reports.silent("m") == {"a"}
    pass_time(clock, reports, 2)
    assert reports.silent("m") == {"a"}
    pass_time(clock, reports, 1)
    assert reports.silent("m") == {"a", "b"}
    reports.hear(told("b"))
    assert reports.silent("m") == {"a"}


def test_while_this_process_is_stopped_nothing_ages():
    clock, reports = listening()
    reports.hear(told("a"))
    reports.hear(told("b"))
    clock.time_s += 600
    reports.loop_ran()
    assert not reports.silent("m")
    assert states(reports)["a"].load == Load(others=3)


def test_a_replica_that_still_reports_through_serve_is_not_silent_though_it_tells_nothing():
    clock, reports = listening()
    for beat in range(20):
        reports.put("m", {"a": said(beat), "b": Report()})
        clock.run(reports, 1.0)
        reports.loop_ran()
    assert reports.silent("m") == {"b"}


def test_without_a_side_channel_a_report_without_an_age_does_not_age():
    clock, reports = made()
    reports.put("m", {"a": Report(), "b": said(0)})
    clock.run(reports, 60.0)
    assert reports.silent("m") == {"b"}


def test_those_to_ask_are_the_running_ones_that_do_not_tell():
    clock, reports = listening()
    assert sorted(reports.unheard()) == [("m", "a"), ("m", "b")]
    reports.hear(told("a"))
    reports.hear(told("gone"))
    assert reports.unheard() == [("m", "b")]
    assert (reports.is_running("m", "a"), reports.is_running("m", "gone")) == (True, False)
    pass_time(clock, reports, 3)
    assert ("m", "a") in reports.unheard()
    reports.put("m", {"b": Report()})
    assert reports.unheard() == [("m", "b")]


THERE = """
import sys
from ray import cloudpickle
router = cloudpickle.loads(sys.stdin.buffer.read())
from serve_app.replicas.reports import REPLICA_REPORTS
print(router._publish.__globals__["reports"].REPLICA_REPORTS is REPLICA_REPORTS)
"""


def test_the_router_that_serve_pickles_writes_to_the_value_that_readiness_reads():
    cloudpickle.register_pickle_by_value(router)  # as Serve does with the module of a router
    try:
        pickled = cloudpickle.dumps(router.AffinityRouter)
    finally:
        cloudpickle.unregister_pickle_by_value(router)
    found = subprocess.run([sys.executable, "-c", THERE], input=pickled, capture_output=True, check=True)
    assert found.stdout.decode().strip() == "True"
