"""Waiting requests in a fair order: across tenants first, across the adapters of one tenant second.

The method is virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each tenant
has a counter of the tokens that it was charged, and so has each adapter of a tenant. An admission is charged all tokens
that have to be computed then. An output token is charged when it is computed. The smallest counter goes next.

The clock is the counter of the tenant or adapter admitted last. A counter is raised to the clock before it is charged.
So neither idling nor waiting for an adapter earns credit (as in start-time fair queueing, Goyal et al., SIGCOMM 1996).

The bound: while two tenants both have a waiting request that could be admitted, their charges differ by at most
2 * (P + R * O) tokens. P is the most that one admission computes, R is `max_running`, O is the most output tokens of
one request. The same holds between two adapters of one tenant.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median_low

from engines.planning.sequence import TokenSequence

IDLE_SHARES_LIMIT = 1024
"""How many counters of tenants without requests are kept. Beyond it the clock moves forward, which levels the lower
ones."""


@dataclass(slots=True)
class _Shares:
    """Counters by tenant, or by adapter.

    A counter outlives its requests until the clock has passed it. Otherwise a tenant that sends one request after
    another would start from the clock each time, always before those who wait.
    """

    clock: int = 0
    charged: dict[str, int] = field(default_factory=dict)
    live: dict[str, int] = field(default_factory=dict)

    def enter(self, key: str) -> None:
        self.charged.setdefault(key, self.clock)
        self.live[key] = self.live.get(key, 0) + 1

    def leave(self, key: str) -> None:
        self.live[key] -= 1
        if self.live[key]:
            return
        del self.live[key]
        if self.charged[key] <= self.clock:
            del self.charged[key]
        elif len(self.charged) - len(self.live) > IDLE_SHARES_LIMIT:
            self.clock = max(self.clock, median_low(self.charged[k] for k in self.charged if k not in self.live))
            self._forget()

    def admit(self, key: str) -> None:
        if self.charged[key] > self.clock:
            self.clock = self.charged[key]
            self._forget()

    def charge(self, key: str, tokens: int) -> None:
        self.charged[key] = max(self.charged[key], self.clock) + tokens

    def order(self, keys: Iterable[str]) -> list[str]:
        return sorted(keys, key=self.charged.__getitem__)

    def _forget(self) -> None:
        for key in [k for k, charged in self.charged.items() if charged <= self.clock and k not in self.live]:
            del self.charged[key]


@dataclass(slots=True)
class _Tenant:
    adapters: _Shares = field(default_factory=_Shares)
    waiting: dict[str, deque[TokenSequence]] = field(default_factory=dict)


class FairQueue:
    """Not thread-safe: the engine loop owns it. A sequence is live from `join` to `retire`, waiting or not."""

    def __init__(self) -> None:
        self._shares = _Shares()
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[str, None] = {}  # tenants, in the order in which they began to wait
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def join(self, sequence: TokenSequence) -> None:
        """A new request: count it as live and let it wait."""
        name = sequence.request.tenant
        self._shares.enter(name)
        self._tenants.setdefault(name, _Tenant()).adapters.enter(sequence.adapter_digest)
        self._queue(sequence).append(sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """A preempted request waits again, before the others of its tenant and adapter."""
        self._queue(sequence).appendleft(sequence)

    def _queue(self, sequence: TokenSequence) -> deque[TokenSequence]:
        self._num_waiting += 1
        name = sequence.request.tenant
        self._waiting[name] = None
        return self._tenants[name].waiting.setdefault(sequence.adapter_digest, deque())

    def heads(self) -> Iterator[TokenSequence]:
        """The first waiting request of every tenant and adapter, the one to serve next first."""
        for name in self._shares.order(self._waiting):
            tenant = self._tenants[name]
            for digest in tenant.adapters.order(tenant.waiting):
                yield tenant.waiting[digest][0]

    def admit(self, sequence: TokenSequence, tokens: int) -> None:
        """A waiting sequence stops waiting. It is charged the tokens that have to be computed for it now."""
        self.remove(sequence)
        name = sequence.request.tenant
        self._shares.admit(name)
        self._tenants[name].adapters.admit(sequence.adapter_digest)
        self.charge(sequence, tokens)

    def remove(self, sequence: TokenSequence) -> None:
        """A waiting sequence stops waiting, at any place in the queue; it stays live."""
        name = sequence.request.tenant
        tenant = self._tenants[name]
        queue = tenant.waiting[sequence.adapter_digest]
        queue.remove(sequence)
        self._num_waiting -= 1
        if not queue:
            del tenant.waiting[sequence.adapter_digest]
        if not tenant.waiting:
            del self._waiting[name]

    def charge(self, sequence: TokenSequence, tokens: int) -> None:
        """Account tokens to a live sequence."""
        name = sequence.request.tenant
        self._shares.charge(name, tokens)
        self._tenants[name].adapters.charge(sequence.adapter_digest, tokens)

    def retire(self, sequence: TokenSequence) -> None:
        """The request has ended."""
        name = sequence.request.tenant
        self._tenants[name].adapters.leave(sequence.adapter_digest)
        self._shares.leave(name)
        if name not in self._shares.live:
            # The tenant has no requests, so the counters of its adapters delay none.
            del self._tenants[name]
