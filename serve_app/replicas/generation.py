"""The interface to the engines: send a request to a deployment, receive its tokens."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from engines.interface.protocol import GenerateRequest, TokenDelta
from serve_app.base.errors import FirstTokenTimeout, ReplicaLost
from serve_app.replicas.status import ON_REPLICA
from serve_app.replicas.token_gaps import TokenGaps


def on_replica(replica_id: str) -> str:
    """The affinity of a request that only this replica may run."""
    return ON_REPLICA + replica_id


class Replicas(Protocol):
    """Runs the engines: in Ray (`over_ray.py`), or in this process (`in_process.py`)."""

    def generate(self, deployment: str, request: GenerateRequest, *, affinity: str) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one generation; the last one has a finish reason. Closing the iterator ends the generation at
        once.

        Requests with the same `affinity` (other than "") prefer the same replica; with `on_replica(…)` they run on that
        one only. Raises an `EngineError`, `NoReplica`
        or `ReplicaLost`.
        """

    def running(self, deployment: str) -> Sequence[str]:
        """The ids of the replicas that take requests, as far as they are known."""

    def held(self, deployment: str) -> Collection[bytes]:
        """The `adapter_key` of each adapter in a device slot of a replica, as far as it is known."""

    async def readiness(self, deployments: Collection[str]) -> Mapping[str, str | None]:
        """For each deployment None if it can produce a token, else the reason. Decided by its engine's progress,
        without waiting.
        """


class Generation:
    """A generation whose first delta has come."""

    def __init__(self, first: TokenDelta, rest: AsyncGenerator[TokenDelta, None], gaps: TokenGaps) -> None:
        self.first = first
        self._rest = rest
        self._gaps = gaps
        self._came_at = time.monotonic()

    async def next(self) -> TokenDelta:
        """Raises what `Replicas.generate` raises. Do not call it after the delta with the finish reason."""
        try:
            delta = await anext(self._rest)
        except StopAsyncIteration as exc:
            raise ReplicaLost("The replica ended the stream without a finish reason.") from exc
        now = time.monotonic()
        self._gaps.add(now - self._came_at, len(delta.token_ids))
        self._came_at = now
        return delta

    async def close(self) -> None:
        """End it; idempotent."""
        await self._rest.aclose()


@asynccontextmanager
async def open_generation(
    deltas: AsyncGenerator[TokenDelta, None], first_token_timeout_s: float, gaps: TokenGaps
) -> AsyncIterator[Generation]:
    """Wait for the first delta, so that an earlier failure can still set the HTTP status. The generation ends when the
    context does. `gaps` counts its tokens.

    Raises `FirstTokenTimeout` besides what `Replicas.generate` raises.
    """
    try:
        try:
            async with asyncio.timeout(first_token_timeout_s) as limit:
                first = await anext(deltas)
        except StopAsyncIteration as exc:
            raise ReplicaLost("The replica ended the stream before the first token.") from exc
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise FirstTokenTimeout(f"No token came within {first_token_timeout_s:g} s; try again.") from exc
        yield Generation(first, deltas, gaps)
    finally:
        await deltas.aclose()
