"""Places shared between tenants: in a full queue, and among the running."""

import random

import pytest

from engines.planning.places import whom_to_displace
from tests.support.engines.scheduler_drive import Slots, drive, sequence_of


@pytest.mark.parametrize(
    ("holders", "tenant", "displaced"),
    [
        ("", "b", None),
        ("aaaa", "a", None),
        ("aaaa", "b", 3),
        ("ab", "c", None),
        ("aab", "c", 1),
        ("aabb", "b", None),
        ("aaabb", "b", None),
        ("aaaabb", "b", 3),
        ("abababa", "c", 6),
    ],
)
def test_a_place_goes_to_a_tenant_that_has_fewer_even_then(holders: str, tenant: str, displaced: int | None) -> None:
    assert whom_to_displace([(name, place) for place, name in enumerate(holders)], tenant) == displaced


def test_whoever_displaces_is_not_displaced_in_turn() -> None:
    rng = random.Random(1)
    holders = list("a" * 20)
    for _ in range(1000):
        tenant = rng.choice("abcd")
        place = whom_to_displace(list(zip(holders, range(20), strict=True)), tenant)
        if place is not None:
            del holders[place]
            holders.append(tenant)
    assert sorted(map(holders.count, "abcd")) == [5, 5, 5, 5]


def test_a_tenant_that_comes_late_gets_its_share_of_the_running_at_once() -> None:
    driven = drive(max_running=8)
    driven.add(*(sequence_of([1, index], 200, tenant="a") for index in range(8)))
    for _ in range(5):
        driven.step()
    driven.add(*(sequence_of([2, index], 200, tenant="b") for index in range(50)))
    for _ in range(10):
        driven.step()
    running = [sequence.request.tenant for sequence in driven.scheduler.running]
    assert sorted(running) == ["a"] * 4 + ["b"] * 4
    assert driven.scheduler.preemptions == 4
    for _ in range(100):
        driven.step()
    assert driven.scheduler.preemptions == 4, "nobody gives a place up in turn"
    driven.run()
    assert len(driven.finished) == 58


def test_nobody_gives_a_place_up_for_one_that_could_not_take_it() -> None:
    driven = drive(max_running=4, slots=Slots(1))
    driven.add(*(sequence_of([1, index], 60, tenant="a", adapter="1") for index in range(4)))
    for _ in range(5):
        driven.step()
    driven.add(sequence_of([2], 4, tenant="b", adapter="2"))
    for _ in range(30):
        driven.step()
    assert driven.scheduler.preemptions <= 1
    driven.run()
    assert len(driven.finished) == 5
