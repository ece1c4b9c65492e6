"""The adapter cache with a loader that waits until it is told to go on, and a clock that is set by hand."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event, Semaphore

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engines.interface.errors import AdapterChanged, AdapterError, AdapterRefused, AdapterUnavailable
from engines.interface.protocol import Adapter
from engines.lora.cache import REFUSAL_S, AdapterCache

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Weights:
    digest: str
    nbytes: int


@dataclass
class Files:
    """What lies on the disk: sizes by digest, and errors by directory. Loads of `held` digests wait."""

    nbytes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    held: dict[str, Event] = field(default_factory=dict)
    loads: list[Adapter] = field(default_factory=list)

    def load(self, adapter: Adapter) -> Weights:
        self.loads.append(adapter)
        if adapter.digest in self.held:
            assert self.held[adapter.digest].wait(timeout=60)
        if adapter.directory in self.errors:
            raise self.errors[adapter.directory]
        return Weights(adapter.digest, self.nbytes.get(adapter.digest, 10))


@dataclass
class Device:
    """The model's modules: what is installed in which slot, and what fails to be."""

    installed: dict[int, str] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)

    def install(self, slot: int, adapter: Weights) -> None:
        assert slot not in self.installed
        self.installed[slot] = adapter.digest
        if adapter.digest in self.errors:
            raise self.errors[adapter.digest]

    def remove(self, slot: int) -> None:
        self.installed.pop(slot, None)


class Bench:
    def __init__(self, *, max_slots: int = 2, byte_budget: int = 1000, loaders: int = 2) -> None:
        self.files, self.device, self.now = Files(), Device(), 0.0
        self._done = Semaphore(0)
        self.cache: AdapterCache[Weights] = AdapterCache(
            load=self.files.load,
            modules=self.device,
            max_slots=max_slots,
            byte_budget=byte_budget,
            loaders=loaders,
            timeout_s=TIMEOUT_S,
            on_loaded=self._done.release,
            clock=lambda: self.now,
        )

    def poll(self, *, after: int = 1) -> dict[Adapter, AdapterError]:
        """A poll once this many loads have ended."""
        for _ in range(after):
            assert self._done.acquire(timeout=60)
        return self.cache.poll()

    def hold(self, digest: str) -> Event:
        self.files.held[digest] = Event()
        return self.files.held[digest]

    def loaded(self, *adapters: Adapter) -> None:
        for adapter in adapters:
            self.cache.want(adapter)
            assert not self.poll()
            assert self.cache.ready(adapter)

    def use(self, adapter: Adapter) -> int:
        """Load if need be, pin, and let go of everything again."""
        self.cache.want(adapter)
        if not self.cache.ready(adapter):
            assert not self.poll()
        slot = self.cache.pin(adapter)
        assert slot is not None
        self.cache.unpin(slot)
        self.cache.unwant(adapter)
        return slot


def adapter(digest: str, directory: str = "") -> Adapter:
    return Adapter(digest, directory or f"/{digest}")


A, B, C, D = (adapter(digest) for digest in "abcd")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for event in bench.files.held.values():
        event.set()
    bench.cache.close()


def test_each_load_is_one_line_of_the_log_with_who_what_whence_how_long_and_how_it_ended(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engines.lora.cache")
    for tenant in ("alice", "robin"):
        bench.cache.want(A, tenant)
    assert not bench.poll()
    bench.files.errors["/b"] = AdapterRefused("no such tensor")
    bench.cache.want(B, "robin")
    assert bench.poll()
    lines = [re.sub(r"seconds=[0-9.]+", "seconds=N", record.getMessage()) for record in caplog.records]
    assert lines == [
        "adapter_load key=alice digest=a from=/a seconds=N result=loaded",
        "adapter_load key=robin digest=b from=/b seconds=N result=no such tensor",
    ]


def test_an_adapter_is_loaded_once_whoever_and_how_many_want_it(bench: Bench) -> None:
    go = bench.hold("a")
    for _ in range(3):
        bench.cache.want(A)
    bench.cache.want(adapter("a", "/elsewhere"))
    assert not bench.cache.ready(A)
    go.set()
    assert not bench.poll()
    assert bench.cache.ready(A)
    assert bench.files.loads == [A]
    assert bench.cache.counters.loads == 1


def test_loads_go_in_the_order_in_which_they_were_wanted_and_no_more_at_once_than_allowed(bench: Bench) -> None:
    go = {digest: bench.hold(digest) for digest in "abcd"}
    for one in (A, B, C, D):
        bench.cache.want(one)
    assert not bench.cache.poll()
    go["b"].set()
    bench.poll()
    go["a"].set()
    go["c"].set()
    bench.poll(after=2)
    go["d"].set()
    bench.poll()
    assert set(bench.files.loads[:2]) == {A, B}
    assert bench.files.loads[2:] == [C, D]


def test_an_adapter_that_nobody_wants_any_more_is_not_loaded(bench: Bench) -> None:
    bench.hold("a")
    bench.hold("b")
    for one in (A, B, C):
        bench.cache.want(one)
    bench.cache.unwant(C)
    for event in bench.files.held.values():
        event.set()
    bench.poll(after=2)
    assert not bench.cache.is_loading
    assert set(bench.files.loads) == {A, B}


def test_slots_are_taken_over_least_recently_used_first_and_never_from_one_in_use(bench: Bench) -> None:
    bench.loaded(A, B, C)
    slot_a, slot_b = bench.cache.pin(A), bench.cache.pin(B)
    assert slot_a is not None
    assert slot_b is not None
    assert bench.cache.pin(C) is None
    assert bench.cache.pin(A) == slot_a
    bench.cache.unpin(slot_a)
    assert bench.cache.pin(C) is None  # A is pinned once more
    bench.cache.unpin(slot_a)
    bench.cache.unpin(slot_b)
    assert bench.cache.pin(C) == slot_b  # A was used after B
    assert bench.cache.resident == ("a", "c")
    assert bench.device.installed == {slot_a: "a", slot_b: "c"}
    assert bench.cache.counters.evictions == 1


def test_host_memory_is_given_up_least_recently_used_first_and_its_slot_with_it() -> None:
    bench = Bench(byte_budget=25)
    for one in (A, B):
        bench.use(one)
    bench.use(A)
    bench.use(C)
    assert [bench.cache.ready(one) for one in (A, B, C)] == [True, False, True]
    assert set(bench.cache.resident) == {"a", "c"}
    assert bench.cache.host_bytes == 20


def test_adapters_in_use_are_never_given_up_and_others_wait_for_room_however_long() -> None:
    bench = Bench(byte_budget=15, max_slots=4)
    bench.loaded(A)
    bench.cache.want(B)
    bench.poll()
    bench.cache.want(C)
    for _ in range(5):
        bench.now += TIMEOUT_S
        assert not bench.cache.poll()
    assert bench.files.loads == [A, B]
    assert bench.cache.ready(A)
    bench.cache.unwant(A)
    bench.cache.unwant(B)
    assert not bench.poll()
    assert bench.cache.ready(C)
    assert bench.cache.host_bytes == 10


def test_a_budget_smaller_than_any_adapter_lets_one_in_at_a_time() -> None:
    bench = Bench(byte_budget=1)
    for one in (A, B, A):
        bench.use(one)
        assert bench.cache.host_bytes == 10
    assert bench.files.loads == [A, B, A]


def test_a_refusal_is_told_to_all_who_wait_and_holds_for_a_while(bench: Bench) -> None:
    error = AdapterRefused("no good")
    bench.files.errors["/a"] = error
    bench.cache.want(A)
    bench.cache.want(A)
    assert bench.poll() == {A: error}
    for _ in range(2):
        bench.cache.unwant(A)
        bench.now = REFUSAL_S - 1
        bench.cache.want(A)
        (told,) = bench.poll(after=0).values()
        assert (type(told), told.args) == (AdapterRefused, ("no good",))
        assert told.__traceback__ is None  # not the one that was raised, with the frames of the load
        try:
            raise told
        except AdapterRefused:
            pass
    assert bench.files.loads == [A]
    del bench.files.errors["/a"]
    bench.cache.unwant(A)
    bench.now = REFUSAL_S
    bench.cache.want(A)
    assert bench.poll() == {}
    assert bench.cache.ready(A)
    assert bench.cache.counters.refusals == 1


@pytest.mark.parametrize("error", [AdapterChanged("gone"), AdapterRefused("not a file"), AdapterUnavailable("busy")])
def test_content_that_one_directory_has_lost_is_taken_from_another(error: AdapterError, bench: Bench) -> None:
    copy = adapter("a", "/copy")
    bench.files.errors["/a"] = error
    go = bench.hold("a")
    bench.cache.want(A)
    bench.cache.want(copy)
    go.set()
    assert bench.poll() == {A: error}
    bench.cache.unwant(A)
    assert bench.poll() == {}
    assert bench.files.loads == [A, copy]
    assert bench.cache.ready(copy)


def test_content_that_no_directory_has_fails_each_of_those_who_wait_once(bench: Bench) -> None:
    copy = adapter("a", "/copy")
    bench.files.errors |= {"/a": AdapterChanged("gone"), "/copy": AdapterChanged("gone too")}
    bench.cache.want(A)
    bench.cache.want(copy)
    assert set(bench.poll()) == {A}
    bench.cache.unwant(A)
    assert set(bench.poll()) == {copy}
    bench.cache.unwant(copy)
    assert not bench.cache.is_loading


def test_a_fault_that_is_no_refusal_is_worth_another_try_at_once(bench: Bench) -> None:
    bench.files.errors["/a"] = OSError("the disk said no")
    bench.cache.want(A)
    (error,) = bench.poll().values()
    assert isinstance(error, AdapterUnavailable)
    assert "the disk" not in str(error)
    bench.cache.unwant(A)
    del bench.files.errors["/a"]
    bench.loaded(A)


def test_a_load_that_takes_too_long_fails_those_who_wait_and_is_used_when_it_ends(bench: Bench) -> None:
    go = bench.hold("a")
    bench.cache.want(A)
    assert not bench.cache.poll()
    bench.now = TIMEOUT_S + 1
    (error,) = bench.cache.poll().values()
    assert isinstance(error, AdapterUnavailable)
    assert str(error) == "The checkpoint was not loaded within 60 s; try again."
    bench.cache.unwant(A)
    go.set()
    assert bench.poll() == {}
    bench.cache.want(A)
    assert bench.cache.ready(A)
    assert bench.files.loads == [A]


def test_waiting_for_loaders_that_hang_ends_too() -> None:
    bench = Bench(loaders=1)
    go = bench.hold("a")
    bench.cache.want(A)
    bench.now = 10.0
    bench.cache.want(B)
    bench.now = TIMEOUT_S + 1
    assert set(bench.cache.poll()) == {A}
    bench.cache.unwant(A)
    bench.now = TIMEOUT_S + 11
    assert set(bench.cache.poll()) == {B}
    bench.cache.unwant(B)
    go.set()
    bench.poll()
    assert bench.files.loads == [A]


@pytest.mark.parametrize(
    ("cause", "kind"), [(AdapterRefused("no"), AdapterRefused), (RuntimeError("no memory"), AdapterUnavailable)]
)
def test_an_adapter_that_cannot_be_installed_fails_and_leaves_its_slot_empty(
    cause: Exception, kind: type[AdapterError], bench: Bench
) -> None:
    bench.device.errors["a"] = cause
    bench.loaded(A)
    assert bench.cache.pin(A) is None
    (error,) = bench.cache.poll().values()
    assert isinstance(error, kind)
    bench.cache.unwant(A)
    assert not bench.device.installed
    assert {bench.use(B), bench.use(C)} == {0, 1}


class CacheMachine(RuleBasedStateMachine):
    """Requests that want adapters, pin them when they can, and leave at any moment."""

    @initialize(max_slots=st.integers(1, 3), byte_budget=st.integers(1, 60), loaders=st.integers(1, 3))
    def start(self, max_slots: int, byte_budget: int, loaders: int) -> None:
        self.bench = Bench(max_slots=max_slots, byte_budget=byte_budget, loaders=loaders)
        self.cache = self.bench.cache
        self.byte_budget, self.loaders, self.max_slots = byte_budget, loaders, max_slots
        self.waiting: list[Adapter] = []
        self.running: list[tuple[Adapter, int]] = []
        self.seen_loads = 0

    def poll(self) -> None:
        """A poll after all loads that have been started."""
        while self.cache.num_loading:
            assert not self.bench.poll()

    @rule(number=st.integers(0, 5))
    def want(self, number: int) -> None:
        self.waiting.append(adapter(str(number)))
        self.cache.want(self.waiting[-1])
        self.poll()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.cache.unwant(self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1))))
        self.poll()

    @rule()
    def admit(self) -> None:
        for one in list(self.waiting):
            slot = self.cache.pin(one) if self.cache.ready(one) else None
            if slot is not None:
                self.waiting.remove(one)
                self.running.append((one, slot))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one, slot = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.unpin(slot)
        self.cache.unwant(one)
        self.poll()

    @invariant()
    def what_runs_is_where_it_was_pinned(self) -> None:
        for one, slot in self.running:
            assert self.bench.device.installed[slot] == one.digest
        assert len(self.bench.device.installed) <= self.max_slots
        assert self.cache.num_pinned == len({slot for _, slot in self.running})
        assert set(self.bench.device.installed.values()) == set(self.cache.resident)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.cache.host_bytes <= self.byte_budget + 10 * (1 + self.loaders)

    @invariant()
    def whoever_waits_is_ready_unless_the_memory_is_full_of_what_others_want(self) -> None:
        if any(not self.cache.ready(one) for one in self.waiting):
            wanted = {one.digest for one in [*self.waiting, *(one for one, _ in self.running)]}
            held = [digest for digest in wanted if self.cache.ready(adapter(digest))]
            assert 10 * len(held) >= self.byte_budget

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_load_that_the_system_gives_no_thread_for_fails_its_adapter_alone() -> None:
    bench, wanted = Bench(), adapter("a")
    bench.cache.close()  # from here on the executor refuses work, as it does without a thread
    bench.cache.want(wanted)
    failed = bench.cache.poll()
    assert [(one, type(error)) for one, error in failed.items()] == [(wanted, AdapterUnavailable)]
