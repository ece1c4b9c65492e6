"""Which adapters are loaded, and which of them are in a device slot.

There are two tiers, both least recently used first out: host memory within a bytes budget, and slots on the device,
pinned while a running sequence uses them. Everything is keyed by the adapter's digest. So two paths with the same
content share one load, and a path whose content was replaced is another adapter.

Loads run on their own threads, one per digest, in the order in which adapters were first wanted. An adapter that some
request wants is never evicted. A load waits while the wanted ones fill the budget, so a small budget makes requests
wait, not fail. At most the budget, one adapter, and the adapters being loaded are held. The log has one line for each
load.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from engines.interface.errors import AdapterError, AdapterRefused, AdapterUnavailable, afresh
from engines.interface.protocol import Adapter

logger = logging.getLogger(__name__)

REFUSAL_S = 30.0
"""How long a refusal is answered without reading the files again. It expires, since the directory may have held other
content for a moment.
"""

_REMEMBERED_REFUSALS = 1024


class HostAdapter(Protocol):
    """An adapter in host memory, ready to be put into a slot."""

    @property
    def nbytes(self) -> int: ...


Held = TypeVar("Held", bound=HostAdapter)
Installed = TypeVar("Installed", bound=HostAdapter, contravariant=True)


class SlotModules(Protocol[Installed]):
    """The model's modules, for adapters. Called on the loop's thread only, between steps."""

    def install(self, slot: int, adapter: Installed) -> None:
        """Raises `AdapterRefused` when the model cannot apply it; then the slot is to be removed."""

    def remove(self, slot: int) -> None: ...


@dataclass(slots=True)
class AdapterCounters:
    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0
    refusals: int = 0


@dataclass(slots=True)
class _Queued:
    """`tenant`: who wanted it first."""

    adapter: Adapter
    since: float
    tenant: str


@dataclass(slots=True)
class _Load(Generic[Held]):
    adapter: Adapter
    future: "Future[Held]"
    started: float
    tenant: str


@dataclass(slots=True)
class AdapterCache(Generic[Held]):
    """Owned by the loop's thread; `on_loaded` is called from a loader's thread."""

    load: Callable[[Adapter], Held]
    modules: SlotModules[Held]
    max_slots: int
    byte_budget: int
    loaders: int
    timeout_s: float
    on_loaded: Callable[[], object]
    clock: Callable[[], float] = time.monotonic
    counters: AdapterCounters = field(default_factory=AdapterCounters)
    _executor: ThreadPoolExecutor = field(init=False)
    _host: "OrderedDict[str, Held]" = field(default_factory=OrderedDict)
    _slots: "OrderedDict[str, int]" = field(default_factory=OrderedDict)
    _free_slots: list[int] = field(init=False)
    _pins: dict[int, int] = field(default_factory=dict)
    _wants: dict[str, dict[Adapter, int]] = field(default_factory=dict)
    _queue: dict[str, _Queued] = field(default_factory=dict)
    _loading: dict[str, _Load[Held]] = field(default_factory=dict)
    _refused: "OrderedDict[Adapter, tuple[AdapterError, float]]" = field(default_factory=OrderedDict)
    _failed: dict[Adapter, AdapterError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(self.loaders, thread_name_prefix="adapter-load")
        self._free_slots = list(range(self.max_slots - 1, -1, -1))

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests in slots, least recently used first."""
        return tuple(self._slots)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_in_memory(self) -> int:
        return len(self._host)

    @property
    def host_bytes(self) -> int:
        """Any thread may ask."""
        return sum(weights.nbytes for weights in tuple(self._host.values()))

    @property
    def num_loading(self) -> int:
        """Loads that are under way."""
        return len(self._loading)

    @property
    def num_to_load(self) -> int:
        """Adapters that are being read, or wait for it."""
        return len(self._loading) + len(self._queue)

    @property
    def is_loading(self) -> bool:
        return bool(self._loading or self._queue or self._failed)

    def want(self, adapter: Adapter, tenant: str = "") -> None:
        """A request of this tenant needs the adapter from now until `unwant`."""
        digest = adapter.digest
        wants = self._wants.setdefault(digest, {})
        wants[adapter] = wants.get(adapter, 0) + 1
        if digest in self._host:
            return
        refusal = self._refused.get(adapter)
        if refusal is not None and self.clock() - refusal[1] < REFUSAL_S:
            self._failed[adapter] = afresh(refusal[0])
        elif digest not in self._loading and digest not in self._queue:
            self._queue[digest] = _Queued(adapter, self.clock(), tenant)
            self._start_loads()

    def unwant(self, adapter: Adapter) -> None:
        wants = self._wants[adapter.digest]
        wants[adapter] -= 1
        if not wants[adapter]:
            del wants[adapter]
        if not wants:
            del self._wants[adapter.digest]
            self._queue.pop(adapter.digest, None)
            self._start_loads()

    def ready(self, adapter: Adapter) -> bool:
        return adapter.digest in self._host

    def pin(self, adapter: Adapter) -> int | None:
        """A slot that holds the (ready) adapter until `unpin`; None while all slots are pinned by others."""
        digest = adapter.digest
        slot = self._slots.get(digest)
        if slot is None:
            slot = self._free_slot()
            if slot is None:
                return None
            if not self._install(slot, digest):
                return None
            self._slots[digest] = slot
        self._slots.move_to_end(digest)
        self._host.move_to_end(digest)
        self._pins[slot] = self._pins.get(slot, 0) + 1
        return slot

    def _install(self, slot: int, digest: str) -> bool:
        try:
            self.modules.install(slot, self._host[digest])
            return True
        except AdapterRefused as exc:
            self._host.pop(digest)
            for adapter in self._wants.get(digest, ()):
                self._refuse(adapter, exc)
        except RuntimeError:  # of torch: the device has no memory left, say
            logger.exception("an adapter could not be put on the device")
            self._fail(digest, AdapterUnavailable("The checkpoint could not be put on the device; try again."))
        self.modules.remove(slot)
        self._free_slots.append(slot)
        return False

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]

    def _free_slot(self) -> int | None:
        if self._free_slots:
            return self._free_slots.pop()
        for digest, slot in self._slots.items():
            if slot not in self._pins:
                self._vacate(digest)
                return self._free_slots.pop()
        return None

    def _vacate(self, digest: str) -> None:
        slot = self._slots.pop(digest)
        self.modules.remove(slot)
        self._free_slots.append(slot)
        self.counters.evictions += 1

    def poll(self) -> dict[Adapter, AdapterError]:
        """Take in finished loads and start the next ones; returns what failed since the last call."""
        now = self.clock()
        for digest, load in list(self._loading.items()):
            if load.future.done():
                self._take_in(load, now)
            elif now - load.started > self.timeout_s:
                self._time_out(digest)
        self._start_loads()
        for digest, queued in self._queue.items():
            if len(self._loading) < self.loaders:
                queued.since = now  # it waits for memory, that is, for other requests to end
            elif now - queued.since > self.timeout_s:
                self._time_out(digest)
        failed, self._failed = self._failed, {}
        return failed

    def _take_in(self, load: _Load[Held], now: float) -> None:
        digest = load.adapter.digest
        del self._loading[digest]
        error = load.future.exception()
        logger.info(
            "adapter_load key=%s digest=%s from=%s seconds=%.3f result=%s",
            load.tenant, digest, load.adapter.directory, now - load.started, error or "loaded",
        )  # fmt: skip
        if error is None:
            self.counters.loads += 1
            self.counters.load_seconds += now - load.started
            self._host[digest] = load.future.result()
            self._evict_host()
            return
        if isinstance(error, AdapterRefused):
            self._refuse(load.adapter, error)
        elif isinstance(error, AdapterError):
            self._failed[load.adapter] = error
        else:
            logger.error("an adapter could not be read", exc_info=error)
            self._failed[load.adapter] = AdapterUnavailable("The checkpoint could not be read; try again.")
        # This directory may have lost the content, while another one that a request was bound to still has it.
        for other in self._wants.get(digest, ()):
            if other not in self._failed:
                self._queue[digest] = _Queued(other, now, load.tenant)
                return

    def _refuse(self, adapter: Adapter, error: AdapterError) -> None:
        self.counters.refusals += 1
        self._failed[adapter] = error
        self._refused[adapter] = (afresh(error), self.clock())
        while len(self._refused) > _REMEMBERED_REFUSALS:
            self._refused.popitem(last=False)

    def _time_out(self, digest: str) -> None:
        self._fail(digest, AdapterUnavailable(f"The checkpoint was not loaded within {self.timeout_s:g} s; try again."))

    def _fail(self, digest: str, error: AdapterError) -> None:
        for adapter in self._wants.get(digest, ()):
            self._failed[adapter] = error

    def _start_loads(self) -> None:
        while self._queue and len(self._loading) < self.loaders and self._has_room():
            queued = self._queue.pop(next(iter(self._queue)))
            adapter = queued.adapter
            try:
                future = self._executor.submit(self.load, adapter)
            except RuntimeError:  # the system gives no thread
                logger.exception("an adapter's load could not be started")
                self._fail(adapter.digest, AdapterUnavailable("The checkpoint could not be loaded; try again."))
                continue
            self._loading[adapter.digest] = _Load(adapter, future, self.clock(), queued.tenant)
            future.add_done_callback(lambda _: self.on_loaded())

    def _has_room(self) -> bool:
        """Whether one more adapter fits after evicting adapters that no request wants. One is always let in."""
        wanted = [weights.nbytes for digest, weights in self._host.items() if digest in self._wants]
        return not wanted or sum(wanted) < self.byte_budget

    def _evict_host(self) -> None:
        excess = self.host_bytes - self.byte_budget
        for digest in [d for d in self._host if d not in self._wants]:
            if excess <= 0:
                return
            excess -= self._host.pop(digest).nbytes
            if digest in self._slots:
                self._vacate(digest)

    def close(self) -> None:
        """Running loads end in their own time; their results are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
