"""How old a replica's report may be, and on which clock."""

import math
import subprocess
import sys

from ray import cloudpickle

from serve_app.replicas import router
from serve_app.replicas.reports import ReplicaReports, Report
from tests.support.report_clock import Clock, said


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


def test_a_report_survives_the_way_through_serve_and_a_newer_replica_may_say_more():
    report = Report(is_ready=False, adapters=("d",), beat=7, good_for_s=5.0)
    assert Report.of(report.fields()) == report
    assert Report.of({**report.fields(), "load": 3}) == report
    assert Report.of({"is_ready": True, "adapters": ("d",)}).good_for_s == math.inf  # of a version without an age


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
