"""Implements `Replicas` with engines in this process. A replica uses it where tokens go over Serve's streams. Tests,
tools and benchmarks use it to run a whole service.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

from engines.interface.errors import EngineError
from engines.interface.protocol import Engine, GenerateRequest, Output, TokenDelta
from serve_app.base.errors import ClientTooSlow, NoReplica
from serve_app.replicas.status import adapter_key
from serve_app.replicas.unread import Unread


class _Stream:
    """The unread outputs of one request."""

    def __init__(self, abort: Callable[[], None]) -> None:
        """`abort` ends the generation when the reader does not read."""
        self._abort = abort
        self._unread = Unread()
        self._error: EngineError | ClientTooSlow | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: TokenDelta | EngineError) -> None:
        if self._error is not None:
            return
        if isinstance(event, EngineError):
            self._error = event
        else:
            self._error = self._unread.add(event)
            if self._error is not None:
                self._abort()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenDelta:
        """All outputs since the last call. Raises the error that ended the request, or `ClientTooSlow`."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._unread.take()


class LocalReplicas:
    """One started engine per deployment. It is also the sink of all their outputs."""

    def __init__(self, engines: Mapping[str, Engine], *, stalled_after_s: float = 30.0) -> None:
        """`stalled_after_s`: an engine that made no step for this long while it had work is not ready."""
        self._engines = engines
        self._stalled_after_s = stalled_after_s
        self._streams: dict[str, _Stream] = {}

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output.event)

    async def generate(
        self, deployment: str, request: GenerateRequest, *, affinity: str
    ) -> AsyncGenerator[TokenDelta, None]:
        del affinity  # there is one replica
        engine = self._engines.get(deployment)
        if engine is None:
            raise NoReplica("it is not deployed")
        stream = self._streams[request.request_id] = _Stream(lambda: engine.abort(request.request_id))
        finished = False
        try:
            engine.submit(request, self)
            while not finished:
                delta = await stream.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request.request_id]
            if not finished:
                engine.abort(request.request_id)

    def running(self, deployment: str) -> Sequence[str]:
        return [] if self._why_not(deployment) else [deployment]

    def held(self, deployment: str) -> Collection[bytes]:
        engine = self._engines.get(deployment)
        return [] if engine is None else {adapter_key(digest) for digest in engine.stats().adapters}

    async def readiness(self, deployments: Collection[str]) -> Mapping[str, str | None]:
        return {deployment: self._why_not(deployment) for deployment in deployments}

    def _why_not(self, deployment: str) -> str | None:
        engine = self._engines.get(deployment)
        if engine is None:
            return "it is not running"
        stats = engine.stats()
        if stats.failed:
            return "its engine has failed"
        if stats.stalled_s > self._stalled_after_s:
            return f"its engine has made no progress for {stats.stalled_s:.0f} s"
        return None
