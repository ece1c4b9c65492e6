"""What is counted, and under which labels."""

import asyncio
from dataclasses import fields

from engines.fake import FakeEngine
from serve_app.checkpoints import StoreCounters
from serve_app.metrics import ENGINE_COUNTERS, OTHER, STORE_COUNTERS, AdapterLabels, Growth


def test_adapters_have_labels_of_their_own_up_to_a_bound():
    labels = AdapterLabels(top=3, ever=10)
    shown = {labels.use(f"digest-{n}") for n in range(5)}
    assert shown == {"digest-0", "digest-1", "digest-2", OTHER}


def test_an_adapter_that_is_used_much_more_takes_the_label_of_the_rarest():
    labels = AdapterLabels(top=2, ever=10)
    for digest in ("a", "a", "a", "b"):
        labels.use(digest)
    assert [labels.use("c") for _ in range(3)] == [OTHER, "c", "c"]
    assert labels.use("b") == OTHER
    assert labels.use("a") == "a"


def test_only_so_many_labels_are_given_out_in_the_life_of_a_process():
    labels = AdapterLabels(top=1, ever=3)
    shown = set()
    for n in range(20):
        shown |= {labels.use(f"digest-{n}") for _ in range(2 ** (n + 1))} if n < 8 else {labels.use("late")}
    assert len(shown - {OTHER}) == 3


def test_an_adapter_gets_its_old_label_back_when_all_were_given_out():
    labels = AdapterLabels(top=1, ever=2)
    assert labels.use("a") == "a"
    assert [labels.use("b") for _ in range(2)] == [OTHER, "b"]
    assert [labels.use("c") for _ in range(9)] == [OTHER] * 9
    assert [labels.use("a") for _ in range(3)][-1] == "a"


def test_counting_adapters_takes_bounded_memory():
    labels = AdapterLabels()
    for n in range(25_000):
        labels.use(f"digest-{n}")
    assert len(labels._uses) <= 10_000


def test_totals_are_exported_by_what_they_grew():
    growth = Growth()
    assert growth.of({"reads": 0, "fetches": 2}) == {"fetches": 2}
    assert growth.of({"reads": 3, "fetches": 2}) == {"reads": 3}
    assert growth.of({"reads": 3, "fetches": 2}) == {}


def test_everything_that_a_store_counts_is_declared():
    assert [field.name for field in fields(StoreCounters)] == list(STORE_COUNTERS)


def test_everything_that_the_fake_engine_counts_is_declared():
    async def counters() -> set[str]:
        return set(FakeEngine().stats().counters)

    assert asyncio.run(counters()) <= ENGINE_COUNTERS.keys()
