"""A model with many replicas and ingresses in simulated time: the real policy, reports and frames, without Ray."""

import heapq
import itertools
import random
import statistics
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from serve_app.replicas.channel.frames import decode_events, encode_frame, encode_status
from serve_app.replicas.reports import ReplicaReports, Report
from serve_app.replicas.router import Patience, Wish, candidate_of, choose
from serve_app.replicas.status import (
    STATUS_BEAT_S,
    STATUS_GAP_S,
    STATUS_LOOK_S,
    Load,
    Status,
    adapter_key,
    pack_adapters,
)

BATCH = 32  # max_running
CAPACITY = 160  # and max_waiting
SLOTS = 32
ADAPTERS_PER_REPLICA = 64
MEAN_S = 4.0  # of a request, of which the first second is certain
APP = "model"
PREFIX_BYTES = 4  # of a frame, before its body


@dataclass
class Settings:
    replicas: int
    seconds: float
    warm_s: float
    load: float
    factor: float
    hot: float = 0.0
    from_serve: bool = False
    seed: int = 1

    @property
    def ingresses(self) -> int:
        return max(2, self.replicas // 10)

    @property
    def adapters(self) -> int:
        return self.replicas * ADAPTERS_PER_REPLICA


@dataclass(eq=False)
class Request:
    wish: Wish
    ingress: int
    seconds: float
    seen: int = 0  # requests of the replica when it took this one


@dataclass
class Replica:
    replica_id: str
    running: set[Request] = field(default_factory=set)
    waiting: deque[Request] = field(default_factory=deque)
    adapters: OrderedDict[str, None] = field(default_factory=OrderedDict)
    by_ingress: Counter[int] = field(default_factory=Counter)
    packed: bytes | None = None
    told_at: float = 0.0
    has_news: bool = False

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def use(self, adapter: str) -> bool:
        """Whether the adapter was there; it is now."""
        hit = adapter in self.adapters
        self.adapters[adapter] = None
        self.adapters.move_to_end(adapter)
        if not hit:
            self.packed = None
            if len(self.adapters) > SLOTS:
                self.adapters.popitem(last=False)
        return hit

    def status(self) -> Status:
        if self.packed is None:
            self.packed = pack_adapters(self.adapters)
        load = Load(len(self.running), len(self.waiting), 128 * len(self.waiting), 500, 1000, self.requests)
        return Status(APP, self.replica_id, True, 7.0, load, self.packed)


@dataclass
class Ingress:
    reports: ReplicaReports
    own: Counter[str] = field(default_factory=Counter)
    believed: dict[str, int] = field(default_factory=dict)  # Serve's queue lengths
    last: dict[str, tuple[Status, float]] = field(default_factory=dict)


@dataclass
class Result:
    """What was measured after the warm-up."""

    ratios: list[float] = field(default_factory=list)
    hits: Counter[bool] = field(default_factory=Counter)
    hot_replicas: set[str] = field(default_factory=set)
    hot_hits: Counter[bool] = field(default_factory=Counter)
    stays: Counter[bool] = field(default_factory=Counter)  # whether a conversation is where it was before
    late: Counter[bool] = field(default_factory=Counter)  # whether a request had to wait for a place in a batch
    choices: list[float] = field(default_factory=list)
    frames: int = 0
    frame_bytes: int = 0


class Simulation:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.random = random.Random(settings.seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.serials = itertools.count()
        self.replicas = {name: Replica(name) for name in names(settings.replicas)}
        self.ingresses = [Ingress(ReplicaReports(lambda: self.now)) for _ in range(settings.ingresses)]
        self.patience = Patience(settings.factor)
        self.result = Result()
        self.homes: dict[str, str] = {}
        weights = [1 / rank for rank in range(1, settings.adapters + 1)]
        self.weights = list(itertools.accumulate(weights))

    def run(self) -> Result:
        settings = self.settings
        for ingress in self.ingresses:
            ingress.reports.put(APP, {name: Report() for name in self.replicas})
        if not settings.from_serve:
            self.every(0.5, 0.0, self.turn)
            for replica in self.replicas.values():
                self.every(STATUS_LOOK_S, self.random.random() * STATUS_LOOK_S, lambda r=replica: self.tell(r))
        self.every(0.25, settings.warm_s, self.sample)
        self.at(0.0, self.arrive)
        while self.events and self.events[0][0] < settings.warm_s + settings.seconds:
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.result

    @property
    def is_measured(self) -> bool:
        return self.now >= self.settings.warm_s

    def at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.serials), event))

    def every(self, period_s: float, first: float, event: Callable[[], None]) -> None:
        def again() -> None:
            event()
            self.at(self.now + period_s, again)

        self.at(first, again)

    def turn(self) -> None:
        for ingress in self.ingresses:
            ingress.reports.loop_ran()

    def tell(self, replica: Replica) -> None:
        """As `StatusSender` does."""
        replica.told_at, replica.has_news = self.now, False
        base = replica.status()
        for number, ingress in enumerate(self.ingresses):
            others = base.load.others - replica.by_ingress[number]
            status = replace(base, load=replace(base.load, others=others))
            last, told_at = ingress.last.get(replica.replica_id, (None, 0.0))
            if status == last and self.now - told_at < STATUS_BEAT_S:
                continue
            frame = encode_frame([encode_status(status.after(last))])
            ingress.last[replica.replica_id] = (status, self.now)
            for _, event in decode_events(frame[PREFIX_BYTES:]):
                assert isinstance(event, Status)
                ingress.reports.hear(event)
            if self.is_measured:
                self.result.frames += 1
                self.result.frame_bytes += len(frame)

    def tell_soon(self, replica: Replica) -> None:
        if not (replica.has_news or self.settings.from_serve):
            replica.has_news = True
            at = max(self.now, replica.told_at + STATUS_GAP_S)
            self.at(at, lambda: self.tell(replica) if replica.has_news else None)

    def sample(self) -> None:
        requests = [replica.requests for replica in self.replicas.values()]
        self.result.ratios.append(max(requests) / statistics.mean(requests))

    def arrive(self) -> None:
        settings = self.settings
        rate = settings.load * BATCH * settings.replicas / MEAN_S
        self.at(self.now + self.random.expovariate(rate), self.arrive)
        seconds = 1.0 + self.random.expovariate(1 / (MEAN_S - 1.0))
        self.send(Request(self.wish(), self.random.randrange(settings.ingresses), seconds))

    def wish(self) -> Wish:
        """An eighth has no adapter, and some of these no key. Each adapter has some conversations at a time."""
        serial = str(next(self.serials))
        if self.random.random() < self.settings.hot:
            return Wish(f"hot {self.random.randrange(20 * self.settings.replicas)}", "hot", serial)
        kind = self.random.random()
        if kind < 1 / 32:
            return Wish("", "", serial)
        if kind < 1 / 8:
            return Wish(f"base {self.random.randrange(20 * self.settings.replicas)}", "", serial)
        (adapter,) = self.random.choices(range(self.settings.adapters), cum_weights=self.weights)
        return Wish(f"{adapter} {self.random.randrange(20)}", f"adapter {adapter}", serial)

    def send(self, request: Request) -> None:
        ingress, wish = self.ingresses[request.ingress], request.wish
        began = time.perf_counter()
        adapter = adapter_key(wish.adapter) if wish.adapter else None
        candidates = [
            candidate_of(
                state,
                adapter,
                own=ingress.own[state.replica_id],
                queue=ingress.believed.get(state.replica_id, 0),
                capacity=CAPACITY,
            )
            for state in ingress.reports.replicas(APP) or ()
        ]
        chosen = choose(candidates, wish, self.patience)[0].replica_id
        self.result.choices.append(time.perf_counter() - began)
        self.take(self.replicas[chosen], request)

    def take(self, replica: Replica, request: Request) -> None:
        ingress, name = self.ingresses[request.ingress], replica.replica_id
        ingress.own[name] += 1
        ingress.believed[name] = ingress.believed.get(name, 0) + 1
        replica.by_ingress[request.ingress] += 1
        hit = replica.use(request.wish.adapter) if request.wish.adapter else None
        if self.is_measured and hit is not None:
            self.result.hits[hit] += 1
            if request.wish.adapter == "hot":
                self.result.hot_hits[hit] += 1
                self.result.hot_replicas.add(name)
        affinity = request.wish.affinity
        if self.is_measured and affinity in self.homes:
            self.result.stays[self.homes[affinity] == name] += 1
        if affinity:
            self.homes[affinity] = name
        replica.waiting.append(request)
        request.seen = replica.requests
        if self.is_measured:
            self.result.late[len(replica.running) >= BATCH] += 1
        self.tell_soon(replica)
        self.begin(replica)

    def begin(self, replica: Replica) -> None:
        while replica.waiting and len(replica.running) < BATCH:
            request = replica.waiting.popleft()
            replica.running.add(request)
            self.at(self.now + request.seconds, lambda request=request: self.end(replica, request))

    def end(self, replica: Replica, request: Request) -> None:
        replica.running.discard(request)
        replica.by_ingress[request.ingress] -= 1
        ingress = self.ingresses[request.ingress]
        ingress.own[replica.replica_id] -= 1
        # A unary call brings the queue length with its reply: that of the time when it was accepted.
        ingress.believed[replica.replica_id] = max(0, request.seen - 1)
        self.begin(replica)


def names(count: int) -> list[str]:
    """Ids of replicas, the same in every run."""
    source = random.Random(7)
    return [f"{source.getrandbits(40):08x}" for _ in range(count)]
