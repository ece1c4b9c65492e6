"""What an engine's prompts ask of it, measured from what it has computed while something waited."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.interface.protocol import EngineCounters, EngineStats
from serve_app.replicas.scaling.prompt_queue import MOST_LOAD, MOST_S, PromptQueue

RATES = st.integers(1, 10_000)
GAPS = st.integers(1, 9)


class Drive:
    """An engine that a test drives, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stats = EngineStats()
        self.queue = PromptQueue(lambda: self.now)

    def after(self, seconds: float, *, computed: int, queued: int) -> tuple[float, float]:
        self.now += seconds
        total = self.stats.counters.prompt_tokens + computed
        self.stats = replace(self.stats, queued_tokens=queued, counters=EngineCounters(prompt_tokens=total))
        self.queue.look(self.stats)
        return self.queue.queued_s, self.queue.load


@given(RATES, st.lists(st.integers(1, 10**6), min_size=1, max_size=9), GAPS)
def test_at_a_steady_rate_the_time_is_the_queue_divided_by_the_rate(rate: int, queues: list[int], gap_s: int) -> None:
    drive = Drive()
    drive.after(gap_s, computed=0, queued=10**9)
    for queued in queues:
        told, _ = drive.after(gap_s, computed=rate * gap_s, queued=queued)
        assert told == pytest.approx(min(MOST_S, queued / rate))


@settings(deadline=None)
@given(RATES, GAPS, st.floats(0.1, 4))
def test_the_load_is_what_comes_by_what_can_be_computed(rate: int, gap_s: int, load: float) -> None:
    drive, queued = Drive(), 0
    more = round(rate * gap_s * load)
    for _ in range(60):
        computed = min(queued, rate * gap_s)
        queued += more - computed
        drive.after(gap_s, computed=computed, queued=queued)
    if load >= 1.2:  # enough that the engine is always busy
        assert drive.queue.load == pytest.approx(more / (rate * gap_s), rel=0.05)
    assert 0 <= drive.queue.load <= MOST_LOAD


def test_nothing_that_waits_takes_no_time() -> None:
    drive = Drive()
    drive.after(2, computed=0, queued=100)
    assert drive.after(2, computed=100, queued=0)[0] == 0


def test_time_without_a_queue_does_not_count_for_the_rate_unless_more_was_computed() -> None:
    drive = Drive()
    drive.after(2, computed=0, queued=300)
    drive.after(2, computed=200, queued=100)  # 100 a second
    assert drive.after(60, computed=200, queued=500)[0] == 5
    drive.after(2, computed=500, queued=0)  # 250 a second
    assert drive.after(60, computed=0, queued=500)[0] == 2


def test_before_anything_was_measured_nothing_is_known() -> None:
    assert Drive().after(2, computed=0, queued=100) == (0, 0)


def test_an_engine_that_stands_still_tells_bounded_values() -> None:
    drive = Drive()
    told = [drive.after(2, computed=0, queued=100 * (n + 1)) for n in range(50)]
    assert told == [(0, 0), *[(MOST_S, MOST_LOAD)] * 49]


def test_requests_that_are_cancelled_in_the_queue_are_no_load() -> None:
    drive = Drive()
    drive.after(2, computed=0, queued=1000)
    drive.after(2, computed=100, queued=900)
    for _ in range(20):
        _, load = drive.after(2, computed=0, queued=0)
    assert load == pytest.approx(0, abs=0.01)


def test_many_looks_in_a_second_measure_once() -> None:
    drive = Drive()
    drive.after(1, computed=0, queued=100)
    for _ in range(9):
        assert drive.after(0.1, computed=1, queued=100)[0] == 0
    assert drive.after(0.2, computed=1, queued=100)[0] == pytest.approx(100 / (10 / 1.1))
