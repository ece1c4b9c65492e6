"""Implements `Replicas` over Ray Serve: sends requests to model replicas and reports readiness."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from engines.interface.errors import EngineError, QueueFull
from engines.interface.protocol import GenerateRequest, TokenDelta
from serve_app.base.errors import NoReplica, ReplicaLost, ServingError
from serve_app.replicas.channel.listener import Listener, Stream
from serve_app.replicas.readiness import AppStatus, ReadinessWatch
from serve_app.replicas.router import STATUS_METHOD

logger = logging.getLogger(__name__)

ENGINE_DEPLOYMENT = "engine"
_LOOK_S = 0.5  # how often a request that waits for a replica checks for one
T = TypeVar("T")


def _open_handle(app: str) -> DeploymentHandle:
    # Not checked: a model may be deployed after the ingress that names it.
    return serve.get_deployment_handle(ENGINE_DEPLOYMENT, app_name=app, _check_exists=False)


class RayReplicas:
    """`generation.Replicas` over the handles of Serve. Tokens come over the side channel, or with `listener` None as
    Serve's own streams.
    """

    def __init__(
        self,
        watch: ReadinessWatch,
        listener: Listener | None,
        *,
        no_replica_timeout_s: float,
        open_handle: Callable[[str], DeploymentHandle] = _open_handle,
    ) -> None:
        """`open_handle`: opens a handle to an application's engine, which need not be deployed yet."""
        self._watch = watch
        self._open_handle = open_handle
        self._listener = listener
        self._no_replica_timeout_s = no_replica_timeout_s
        self._handles: dict[str, DeploymentHandle] = {}
        self._calls: set[asyncio.Task[Any]] = set()

    def generate(self, deployment: str, request: GenerateRequest, *, affinity: str) -> AsyncGenerator[TokenDelta, None]:
        digest = request.adapter.digest if request.adapter is not None else ""
        handle = self._handle(deployment).options(multiplexed_model_id=digest, session_id=affinity)
        if self._listener is None:
            return self._over_serve(deployment, handle, request)
        return self._over_channel(deployment, handle, request, self._listener)

    def running(self, deployment: str) -> Sequence[str]:
        return self._watch.running(deployment)

    def held(self, deployment: str) -> Collection[bytes]:
        return self._watch.held(deployment)

    async def readiness(self, deployments: Collection[str]) -> Mapping[str, str | None]:
        for deployment in deployments:
            self._handle(deployment)  # the readiness watch gets its state from this handle's router
        await self._watch.look(deployments)
        return {deployment: self._watch.why_not_ready(deployment) for deployment in deployments}

    async def ask_for_status(self, app: str, replica_id: str) -> None:
        """Ask a replica to tell its status over the side channel. Only with a `listener`."""
        assert self._listener is not None, "nothing listens"
        handle = self._handle(app).options(method_name=STATUS_METHOD, session_id=replica_id)
        response = handle.remote(self._listener.endpoint, app, replica_id)
        try:
            await response
        except asyncio.CancelledError:
            _cancel(response)
            raise

    async def close(self) -> None:
        """End all running calls."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _handle(self, app: str) -> DeploymentHandle:
        if app not in self._handles:
            self._handles[app] = self._open_handle(app).options(method_name="run")
        return self._handles[app]

    async def _over_channel(
        self, app: str, handle: DeploymentHandle, request: GenerateRequest, listener: Listener
    ) -> AsyncGenerator[TokenDelta, None]:
        with closing(listener.open()) as stream:
            response = handle.remote(request, listener.endpoint, stream.stream_id)
            self._keep(_follow(response, stream))
            accepted = self._keep(stream.accepted())
            try:
                await self._taken(app, accepted)
                finished = False
                while not finished:
                    delta = await stream.receive()
                    finished = delta.finish_reason is not None
                    yield delta
            finally:
                accepted.cancel()
                if not stream.is_finished:
                    _cancel(response)

    async def _over_serve(
        self, app: str, handle: DeploymentHandle, request: GenerateRequest
    ) -> AsyncGenerator[TokenDelta, None]:
        response = handle.options(method_name="generate", stream=True).remote(request)
        first = self._keep(anext(response))
        try:
            await self._taken(app, first)
            delta: TokenDelta = first.result()
            yield delta
            async for delta in response:
                yield delta
        except Exception as exc:
            raise translated(exc) from exc
        finally:
            _cancel(response)

    async def _taken(self, app: str, taken: asyncio.Future[T]) -> None:
        """Wait until a replica has accepted the request. Raises `NoReplica` when none has been running for too long.
        Raises `ReplicaLost` when a replica stops reporting meanwhile and another is ready: the silent one may have the
        request.

        While all replicas are full, or one is being started, this waits; the caller sets a time limit. A call to an
        application that does not exist would wait without end and without an error.
        """
        silent_before = self._watch.silent(app)
        while True:
            await self._watch.look([app])
            if self._watch.has_failed(app):
                raise NoReplica("it failed to deploy")
            if await self._taken_soon(app, taken, silent_before):
                return
            await self._watch.look([app])
            reason = self._watch.why_not_ready(app)
            if reason is not None and self._watch.is_down(app) and not taken.done():
                raise NoReplica(reason)

    async def _taken_soon(self, app: str, taken: asyncio.Future[T], silent_before: frozenset[str]) -> bool:
        until = time.monotonic() + self._no_replica_timeout_s
        while (left_s := until - time.monotonic()) > 0:
            done, _ = await asyncio.wait([taken], timeout=min(left_s, _LOOK_S))
            if done:
                return True
            has_lost_one = not self._watch.silent(app) <= silent_before
            if has_lost_one and self._watch.why_not_ready(app) is None:
                raise ReplicaLost("The replica for this request does not answer.")
        return False

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run to the end even when its request has ended: Ray's messages must be received."""
        task = asyncio.get_running_loop().create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, call: "asyncio.Task[Any]") -> None:
        self._calls.discard(call)
        if not call.cancelled():
            call.exception()  # its waiter has seen the error


async def _follow(response: DeploymentResponse, stream: Stream) -> None:
    try:
        await response
    except Exception as exc:  # any error ends only this request
        stream.fail(translated(exc))
    else:
        stream.call_ended()


def _cancel(response: DeploymentResponse | DeploymentResponseGenerator) -> None:
    # Not at once: Serve misses a call that was assigned to a replica in this turn of the event loop and whose waiting
    # task has not run since.
    asyncio.get_running_loop().call_soon(response.cancel)


def translated(exc: Exception) -> Exception:
    """Convert the error of a failed Serve call to one that `generate` may raise."""
    cause = exc.cause if isinstance(exc, RayTaskError) else exc
    if isinstance(cause, EngineError | ServingError):
        return cause
    if isinstance(cause, BackPressureError):
        _, max_queued_requests, *_ = cause.args
        return QueueFull(max_queued_requests)
    if isinstance(cause, DeploymentUnavailableError):
        return NoReplica("it failed to deploy")
    if isinstance(cause, RayActorError | RequestCancelledError | TaskCancelledError):
        return ReplicaLost("The replica was lost.")
    return exc


def read_statuses() -> dict[str, AppStatus]:
    """The controller's status of each application. Blocks for milliseconds."""
    statuses = {}
    for name, app in serve.status().applications.items():
        engine = app.deployments.get(ENGINE_DEPLOYMENT)
        running = engine.replica_states.get("RUNNING", 0) if engine else 0
        statuses[name] = AppStatus(app.status.value, engine.status.value if engine else "", running)
    return statuses
