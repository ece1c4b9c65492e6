"""The stages of a request, by the times at which they are noted."""

import time

import pytest

from engines.interface.protocol import Timing
from serve_app.api.stages import NO_STAGES, TimedStages


def names(stages: TimedStages) -> list[str]:
    return [stage.name for stage in stages.done]


def test_a_stage_lasts_as_long_as_what_is_done_in_it_also_when_that_fails() -> None:
    stages = TimedStages()
    before = time.monotonic()
    with stages.during("one"):
        inside = time.monotonic()
    with pytest.raises(ValueError, match="x"), stages.during("two"):
        raise ValueError("x")
    one, two = stages.done
    assert (one.name, two.name) == ("one", "two")
    assert before <= one.began_at <= inside <= one.ended_at <= two.began_at <= two.ended_at <= time.monotonic()


@pytest.mark.parametrize("timing", [Timing(0, 0), Timing(1e-9, 0), Timing(0, 1e-9), Timing(3600, 1), Timing(1, 3600)])
def test_the_way_to_the_first_token_is_parted_without_a_gap(timing: Timing) -> None:
    stages = TimedStages()
    before = time.monotonic()
    stages.called()
    stages.answers(timing)
    stages.end()
    route, queue, prefill, decode = stages.done
    assert names(stages) == ["route", "queue", "prefill", "decode"]
    times = [route.began_at, route.ended_at, queue.ended_at, prefill.ended_at, decode.ended_at]
    assert [route.ended_at, queue.ended_at, prefill.ended_at] == [queue.began_at, prefill.began_at, decode.began_at]
    assert before <= times[0]
    assert times == sorted(times)


def test_of_an_upstream_only_the_way_there_and_its_reply_are_known() -> None:
    stages = TimedStages()
    stages.called()
    stages.answers(None)
    stages.end()
    assert names(stages) == ["route", "decode"]


def test_a_request_that_ends_before_its_first_token_ends_on_its_way_to_a_replica() -> None:
    stages = TimedStages()
    stages.called()
    for _ in range(2):
        stages.end()
    assert names(stages) == ["route"]


def test_a_request_that_is_not_traced_keeps_nothing() -> None:
    with NO_STAGES.during("one"):
        NO_STAGES.called()
    NO_STAGES.answers(Timing(1, 1))
    NO_STAGES.end()
    assert NO_STAGES.done == ()
