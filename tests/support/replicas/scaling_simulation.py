"""A model that scales over a day, in simulated time: the real policy and measurements, and Serve's own delays.

A replica has a batch and a KV cache. It computes prompts one after the other, and its running requests decode at one
speed. A request takes its KV blocks when it leaves the queue and gives them back at its end.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import TimeStampedValue
from ray.serve.autoscaling_policy import _apply_delay_logic, _apply_scaling_factors
from ray.serve.config import AutoscalingConfig

from engines.interface.protocol import EngineCounters, EngineStats
from serve_app.replicas.scaling.policy import LoadPolicy
from serve_app.replicas.scaling.prompt_queue import PromptQueue

DAY_S = 86_400
BATCH = 64  # max_running
PROMPT_TOKENS_PER_S = 8000
REPLY_TOKENS_PER_S = 40
CACHE_TOKENS = 160_000
PUSH_S = 2  # as config.yaml sets it
START_S = 90
KEPT_TARGET = 0.8  # of batch and cache


@dataclass(frozen=True)
class Request:
    at: float
    prompt: int
    reply: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.reply


@dataclass
class Pool:
    """How a model is scaled. `by`: "load" is our policy, "requests" is Serve's; equal bounds scale nothing."""

    name: str
    least: int
    most: int
    by: str = "load"
    upscale_delay_s: float = 5.0
    downscale_delay_s: float = 300.0
    drain_s: float = 15.0
    start_s: float = START_S


def traffic(seed: int, *, mean_per_s: float, seconds: int = DAY_S, bursts: int = 12) -> Iterator[Request]:
    """A day: few requests at night, most at noon, and bursts of five minutes. In every second burst three times as many
    requests come, in the others the prompts are four times as long.
    """
    rng = random.Random(seed)
    starts = sorted(rng.uniform(0, seconds - 300) for _ in range(bursts))
    for second in range(seconds):
        burst = next((n for n, start in enumerate(starts) if start <= second < start + 300), None)
        rate = (
            mean_per_s
            * (1 - 0.9 * math.cos(2 * math.pi * second / seconds))
            * (3 if burst is not None and burst % 2 else 1)
        )
        number, left = 0, rng.random()
        while left > (chance := math.exp(-rate) * rate**number / math.factorial(number)) and number < 60:
            left -= chance
            number += 1
        for at in sorted(rng.random() for _ in range(number)):
            longer = 4 if burst is not None and burst % 2 == 0 else 1
            prompt = min(16_000, int(rng.lognormvariate(6.2, 0.9)) * longer)
            yield Request(second + at, max(1, prompt), max(1, int(rng.expovariate(1 / 250))))


@dataclass(eq=False)
class Replica:
    ready_at: float
    queue: deque[Request] = field(default_factory=deque)
    ends: list[tuple[float, int]] = field(default_factory=list)  # of running requests, with their tokens
    used: int = 0
    free_at: float = 0.0  # when the prompts that were taken are computed
    computed: int = 0
    queued_tokens: int = 0
    now: float = 0.0
    told: list[EngineStats] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_queue = PromptQueue(lambda: self.now)

    @property
    def requests(self) -> int:
        return len(self.queue) + len(self.ends)

    def add(self, request: Request) -> None:
        self.queue.append(request)
        self.queued_tokens += request.prompt

    def run_until(self, now: float) -> Iterator[tuple[Request, float]]:
        """Yields each request whose prompt is taken, with the time of its first token."""
        while True:
            at = max(self.now, self.free_at)
            while self.ends and self.ends[0][0] <= at:
                self.used -= heapq.heappop(self.ends)[1]
            if at > now or not self.queue:
                break
            request = self.queue[0]
            if len(self.ends) >= BATCH or self.used + request.tokens > CACHE_TOKENS:
                if not self.ends or self.ends[0][0] > now:
                    break
                self.now = self.ends[0][0]
                continue
            self.queue.popleft()
            begins = max(at, request.at)
            self.free_at = begins + request.prompt / PROMPT_TOKENS_PER_S
            self.used += request.tokens
            self.queued_tokens -= request.prompt
            self.computed += request.prompt
            heapq.heappush(self.ends, (self.free_at + request.reply / REPLY_TOKENS_PER_S, request.tokens))
            yield request, self.free_at
        self.now = now
        while self.ends and self.ends[0][0] <= now:
            self.used -= heapq.heappop(self.ends)[1]

    def tell(self) -> dict[str, float]:
        """What a real replica tells the policy."""
        stats = EngineStats(queued_tokens=self.queued_tokens, counters=EngineCounters(prompt_tokens=self.computed))
        self.prompt_queue.look(stats)
        return {
            "batch_used_fraction": len(self.ends) / BATCH,
            "kv_used_fraction": self.used / CACHE_TOKENS,
            "prompt_load": self.prompt_queue.load,
            "queued_s": self.prompt_queue.queued_s,
            "requests": float(self.requests),
        }


@dataclass
class Result:
    pool: Pool
    over_limit_s: set[int] = field(default_factory=set)
    waits: list[float] = field(default_factory=list)
    replica_s: float = 0.0
    most: int = 0


class Simulation:
    """One model with one pool. Requests go to the replica with the fewest, or wait where none runs."""

    def __init__(self, pool: Pool, *, limit_s: float = 5.0) -> None:
        """`limit_s`: the longest time to the first token that is not over the limit."""
        self.pool = pool
        self.limit_s = limit_s
        self.replicas = [Replica(ready_at=0.0) for _ in range(pool.least)]
        self.ending: list[Replica] = []
        self.held: list[Request] = []
        self.target = pool.least
        self.result = Result(pool)
        self._history: deque[tuple[float, dict[Replica, dict[str, float]]]] = deque()
        self._state: dict[str, Any] = {}
        self._policy = LoadPolicy(target_batch=KEPT_TARGET, target_kv=KEPT_TARGET, drain_s=pool.drain_s)
        self._config = AutoscalingConfig(
            min_replicas=pool.least,
            max_replicas=pool.most,
            target_ongoing_requests=KEPT_TARGET * BATCH,
            look_back_period_s=30,
            upscale_delay_s=pool.upscale_delay_s,
            downscale_delay_s=pool.downscale_delay_s,
        )

    def run(self, requests: Iterator[Request], seconds: int) -> Result:
        upcoming = next(requests, None)
        for second in range(seconds):
            now = float(second)
            up = [replica for replica in self.replicas if replica.ready_at <= now]
            while upcoming is not None and upcoming.at < now:
                self.held.append(upcoming)
                upcoming = next(requests, None)
            if up:
                for request in self.held:
                    min(up, key=lambda replica: replica.requests).add(request)
                self.held.clear()
            for replica in (*up, *self.ending):
                for request, first_token in replica.run_until(now):
                    self._note(request, first_token)
            self.ending = [replica for replica in self.ending if replica.requests]
            self.result.replica_s += len(self.replicas) + len(self.ending)
            self.result.most = max(self.result.most, len(self.replicas))
            if second % PUSH_S == 0 and self.pool.least != self.pool.most:
                self._scale(now, up)
        return self.result

    def _note(self, request: Request, first_token: float) -> None:
        wait = first_token - request.at
        self.result.waits.append(wait)
        if wait > self.limit_s:
            self.result.over_limit_s.add(int(request.at))

    def _scale(self, now: float, up: list[Replica]) -> None:
        self._history.append((now, {replica: replica.tell() for replica in up}))
        while self._history[0][0] < now - self._config.look_back_period_s:
            self._history.popleft()
        desired = self._desired(now, up)
        self.target, self._state = _apply_delay_logic(
            _apply_scaling_factors(desired, len(up), self._config), self.target, self._config, self._state, _now=now
        )
        self.target = max(self.pool.least, min(self.pool.most, self.target))
        while len(self.replicas) < self.target:
            self.replicas.append(Replica(ready_at=now + self.pool.start_s, now=now))
        while len(self.replicas) > self.target:
            # Those that do not run yet go first, then those with the fewest requests.
            leaving = max(self.replicas, key=lambda replica: (replica.ready_at > now, -replica.requests))
            self.replicas.remove(leaving)
            self.ending.append(leaving)
            self.held += leaving.queue  # Serve sends what no replica has begun to another one
            leaving.queue.clear()
            leaving.queued_tokens = 0

    def _desired(self, now: float, up: list[Replica]) -> float:
        raw: dict[str, dict[object, list[TimeStampedValue]]] = {}
        for at, told in self._history:
            for replica, stats in told.items():
                if replica in up:
                    for name, value in stats.items():
                        raw.setdefault(name, {}).setdefault(replica, []).append(TimeStampedValue(at, value))
        mean = {
            name: {replica: sum(one.value for one in told) / len(told) for replica, told in of.items()}
            for name, of in raw.items()
        }
        requests = sum(mean.get("requests", {}).values()) + len(self.held)
        if not up:
            return max(1, self.target) if self.held else self.target
        if self.pool.by == "requests":
            return requests / self._config.get_target_ongoing_requests()
        context = SimpleNamespace(
            current_num_replicas=len(up),
            target_num_replicas=self.target,
            total_num_requests=requests,
            aggregated_metrics=mean,
            raw_metrics=raw,
            config=self._config,
        )
        return self._policy(context)[0]
