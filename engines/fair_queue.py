"""Waiting requests in a fair order: across tenants first, across the adapters of one tenant second.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant, and each
adapter of a tenant, has a counter of the tokens it was served. The one with the smallest counter goes next. A tenant
that comes back after a pause starts from the smallest counter among those that are active, so that idling earns no
credit. Between two tenants that both have requests waiting, the tokens served differ by at most the tokens of the
requests admitted before the counters met: one request's prompt and the output of `max_running` of them.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.sequence import Sequence


@dataclass(slots=True)
class _Share:
    """What one tenant, or one adapter of it, was served, and how many of its requests are in the engine."""

    served: float = 0.0
    live: int = 0


@dataclass(slots=True)
class _Tenant:
    share: _Share = field(default_factory=_Share)
    adapters: dict[str, _Share] = field(default_factory=dict)
    waiting: dict[str, deque[Sequence]] = field(default_factory=dict)


class FairQueue:
    """Not thread-safe: the engine loop owns it. A sequence is live from `push` to `retire`; it may be pushed again."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def join(self, sequence: Sequence) -> None:
        """A new request: count it as live and let it wait."""
        tenant = self._tenants.get(sequence.request.tenant)
        if tenant is None:
            tenant = self._tenants[sequence.request.tenant] = _Tenant()
        _enter(tenant.share, [other.share for other in self._tenants.values()])
        share = tenant.adapters.setdefault(sequence.adapter_digest, _Share())
        _enter(share, list(tenant.adapters.values()))
        self._queue(tenant, sequence).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A preempted request waits again, before the others of its tenant and adapter."""
        self._queue(self._tenants[sequence.request.tenant], sequence).appendleft(sequence)

    def _queue(self, tenant: _Tenant, sequence: Sequence) -> deque[Sequence]:
        self._num_waiting += 1
        return tenant.waiting.setdefault(sequence.adapter_digest, deque())

    def heads(self) -> Iterator[Sequence]:
        """The first waiting request of every tenant and adapter, the one to serve next first."""
        for tenant in sorted(self._tenants.values(), key=lambda t: t.share.served):
            for digest in sorted(tenant.waiting, key=lambda d: tenant.adapters[d].served):
                yield tenant.waiting[digest][0]

    def take(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, wherever it stands; it stays live."""
        tenant = self._tenants[sequence.request.tenant]
        queue = tenant.waiting[sequence.adapter_digest]
        queue.remove(sequence)
        self._num_waiting -= 1
        if not queue:
            del tenant.waiting[sequence.adapter_digest]

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Account tokens that were computed for a live sequence."""
        tenant = self._tenants[sequence.request.tenant]
        tenant.share.served += tokens
        tenant.adapters[sequence.adapter_digest].served += tokens

    def retire(self, sequence: Sequence) -> None:
        """The request has ended. Tenants and adapters without live requests are forgotten."""
        tenant = self._tenants[sequence.request.tenant]
        share = tenant.adapters[sequence.adapter_digest]
        share.live -= 1
        tenant.share.live -= 1
        if not share.live:
            del tenant.adapters[sequence.adapter_digest]
        if not tenant.share.live:
            del self._tenants[sequence.request.tenant]


def _enter(share: _Share, active: list[_Share]) -> None:
    if share.live == 0:
        floor = min((other.served for other in active if other.live), default=0.0)
        share.served = max(share.served, floor)
    share.live += 1
