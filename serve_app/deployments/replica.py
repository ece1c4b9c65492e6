"""One model replica: one engine, its requests, its health."""

import asyncio
import importlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

from pydantic import ValidationError

from engines.fake import FakeEngine
from engines.interface.protocol import Engine, EngineStats, GenerateRequest, TokenDelta
from serve_app.base.explain import explain
from serve_app.base.logs import join_serve_logs, log_request, request_id_of
from serve_app.base.watchdog import Watchdog
from serve_app.config.model import EngineUserConfig, ModelArgs
from serve_app.deployments.metrics import EngineMetrics
from serve_app.replicas.channel.link import Links, run_request
from serve_app.replicas.channel.listener import Endpoint
from serve_app.replicas.in_process import LocalReplicas
from serve_app.replicas.reports import BEAT_S, Report
from serve_app.replicas.scaling.prompt_queue import PromptQueue
from serve_app.replicas.status import Load, Status, pack_adapters
from serve_app.replicas.status_sender import StatusSender

logger = logging.getLogger(__name__)

_TORCH_ENGINE = ("engines.torch_engine", "TorchEngine")
_REPORT_INTERVAL_S = 1.0
_SILENCES = 3  # a replica that is silent for so many times `silent_after_s` is killed


class EngineUnhealthy(RuntimeError):
    """The engine failed or makes no progress: Serve must replace this replica."""


class Replica:
    """The Serve deployment of a model. Serve constructs it in its own process, and lets its requests finish before it
    stops it (`graceful_shutdown_timeout_s`).
    """

    async def __init__(self, args: ModelArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns when the engine can produce a token. Raises what `Engine.start` raises."""
        join_serve_logs()
        self._limits = args.health
        self._max_running = args.max_running
        self._prompt_queue = PromptQueue()
        self._engine = _make_engine(args)
        await self._engine.start()
        self._watchdog = Watchdog(_SILENCES * args.health.silent_after_s)
        self._links = Links()
        self._local = LocalReplicas({"": self._engine})
        self._statuses = StatusSender(self._links, self._status)
        self._has_streamed_over_serve = False
        self._serials = itertools.count(1)
        self._metrics = EngineMetrics(args.id)
        self._reporting = asyncio.get_running_loop().create_task(self._report())

    async def run(self, request: GenerateRequest, endpoint: Endpoint, stream_id: int) -> None:
        """Generate and send the tokens over the side channel. Returns when the request has ended; cancel it to stop
        generating.
        """
        _log_start(request)
        link = await self._links.to(endpoint)
        self._statuses.tell_soon()
        await run_request(self._engine, self._with_own_id(request), link, stream_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """The same as a Serve stream, one message per step, for clusters whose replicas cannot connect to an
        ingress.
        """
        self._has_streamed_over_serve = True
        _log_start(request)
        deltas = self._local.generate("", self._with_own_id(request), affinity="")
        try:
            async for delta in deltas:
                yield delta
        finally:
            await deltas.aclose()

    async def tell_status(self, endpoint: Endpoint, app: str, replica_id: str) -> None:
        """Tell an ingress this replica's status over the side channel from now on, under these names. Raises
        `ReplicaLost` when the ingress cannot be reached.
        """
        await self._statuses.add(endpoint, app, replica_id)

    def check_health(self) -> None:
        """Serve calls this, and replaces a replica that raises repeatedly."""
        join_serve_logs()
        stats = self._engine.stats()
        if stats.failed:
            raise EngineUnhealthy("The engine has failed.")
        if stats.stalled_s > self._limits.restart_after_s:
            raise EngineUnhealthy(f"The engine has made no progress for {stats.stalled_s:.0f} s.")

    def record_routing_stats(self) -> dict[str, object]:
        """This replica's report to routers and readiness (`replicas/reports.py`). Serve reads it every second, and
        sends it to all ingresses when it has changed. It says almost nothing while ingresses listen to this replica,
        unless others have streams over Serve and cannot.
        """
        stats = self._engine.stats()
        is_ready = self._is_ready(stats)
        if self._statuses.has_listeners and not self._has_streamed_over_serve:
            return Report(is_ready).fields()
        beat = int(time.monotonic() / BEAT_S)
        return Report(is_ready, pack_adapters(stats.adapters), beat, self._limits.silent_after_s).fields()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy looks at (`replicas/scaling/policy.py`), and `streams`: requests whose tokens are
        being sent to an ingress.
        """
        stats = self._engine.stats()
        self._prompt_queue.look(stats)
        used = stats.blocks_total - stats.blocks_free
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "streams": self._open_streams,
            "batch_used_fraction": stats.running / self._max_running,
            "kv_used_fraction": used / stats.blocks_total if stats.blocks_total else 0.0,
            "prompt_load": self._prompt_queue.load,
            "queued_s": self._prompt_queue.queued_s,
            "adapters_pinned": stats.adapter_slots_pinned,
        }

    def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Apply new health limits while running. Never raises: Serve would stop all replicas."""
        try:
            self._limits = EngineUserConfig.model_validate(user_config)
        except ValidationError as exc:
            logger.error("user_config is refused: %s", explain(exc.errors()[0], "user_config")[1])

    async def __del__(self) -> None:
        """Serve awaits this once the requests are finished or out of time."""
        await self.close()

    async def close(self) -> None:
        self._reporting.cancel()
        await self._statuses.close()
        await self._engine.close()
        await self._links.close()
        await self._watchdog.close()

    @property
    def _open_streams(self) -> int:
        return self._links.open_streams + self._local.open_streams

    def _status(self) -> Status:
        stats = self._engine.stats()
        load = Load(
            stats.running,
            stats.waiting,
            stats.queued_tokens,
            stats.blocks_free,
            stats.blocks_total,
            others=self._open_streams,
        )
        adapters = pack_adapters(stats.adapters)
        return Status("", "", self._is_ready(stats), self._limits.silent_after_s, load, adapters)

    def _is_ready(self, stats: EngineStats) -> bool:
        return not stats.failed and stats.stalled_s <= self._limits.stalled_after_s

    def _with_own_id(self, request: GenerateRequest) -> GenerateRequest:
        # Clients choose request ids, and two ingresses may forward the same one.
        return replace(request, request_id=f"{request.request_id}/{next(self._serials)}")

    async def _report(self) -> None:
        while True:
            self._metrics.record(self._engine.stats())
            await asyncio.sleep(_REPORT_INTERVAL_S)


def _log_start(request: GenerateRequest) -> None:
    log_request(request_id_of(request.request_id))
    logger.debug("takes %s: %d prompt tokens", request.request_id, len(request.prompt_token_ids))


def _make_engine(args: ModelArgs) -> Engine:
    if args.engine == "fake":
        return FakeEngine(args.fake_config())
    module, name = _TORCH_ENGINE  # by name, so that an ingress can import this package without torch
    engine: Engine = getattr(importlib.import_module(module), name)(args.engine_config())
    return engine
