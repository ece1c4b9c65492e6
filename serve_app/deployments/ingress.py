"""The ingress deployment: the HTTP application in a Serve replica, connected to models and checkpoints."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import ray
from ray import serve
from starlette.applications import Starlette

from serve_app.base.logs import join_serve_logs
from serve_app.base.without_torch import do_without_torch
from serve_app.checkpoints import CheckpointStore
from serve_app.config.api import ApiArgs
from serve_app.config.ledger import LedgerConfig
from serve_app.config.service import CheckpointsConfig, ImagesConfig
from serve_app.deployments.limits_board import RayBoard
from serve_app.deployments.metrics import IngressMetrics
from serve_app.deployments.node_metrics import NodeMetrics
from serve_app.deployments.tracing import Traced, open_spans
from serve_app.http.app import build_http_app
from serve_app.http.service import Service
from serve_app.images.over_ray import RayImages
from serve_app.ledger.ledger import Ledger
from serve_app.replicas.channel.listener import Listener
from serve_app.replicas.over_ray import RayReplicas, read_statuses
from serve_app.replicas.readiness import ReadinessWatch
from serve_app.replicas.reports import REPLICA_REPORTS
from serve_app.replicas.status_requests import StatusRequests

logger = logging.getLogger(__name__)


class Ingress:
    """The deployment. Serve constructs it, gets its ASGI application, passes its `user_config`, and drains it before it
    stops it (`graceful_shutdown_timeout_s`).
    """

    def __init__(self, args: ApiArgs) -> None:
        do_without_torch()
        join_serve_logs()
        self._args = args
        self._spans = None if args.tracing is None else open_spans(args.tracing)
        self._watch = ReadinessWatch(REPLICA_REPORTS, read_statuses)
        self._listener: Listener | None = None
        self._status_requests: StatusRequests | None = None
        self._changes: set[asyncio.Task[object]] = set()

    async def __serve_build_asgi_app__(self) -> Starlette:
        if self._args.transport == "channel":
            host = self._args.channel_host or ray.util.get_node_ip_address()
            self._listener = await Listener.start(host, on_status=REPLICA_REPORTS.hear)
            logger.info("The side channel listens on %s:%d.", host, self._listener.endpoint.port)
        timeout_s = self._args.no_replica_timeout_s
        self._replicas = RayReplicas(self._watch, self._listener, no_replica_timeout_s=timeout_s)
        if self._listener is not None:
            self._status_requests = StatusRequests(REPLICA_REPORTS, self._replicas.ask_for_status)
        self._metrics = IngressMetrics()
        self._node_metrics = NodeMetrics()
        self._service = Service(
            self._replicas,
            self._open_store,
            open_images=_open_images,
            open_ledger=self._open_ledger,
            recorder=self._metrics if self._spans is None else Traced(self._metrics, self._spans),
            read_metrics=self._node_metrics.read,
            max_requests=self._args.max_ongoing_requests,
            loading_timeout_s=timeout_s,
            exchange=None if self._args.is_alone else RayBoard(serve.get_replica_context().app_name).exchange,
        )
        return build_http_app(self._service)

    async def reconfigure(self, user_config: object) -> None:
        """Apply a configuration. Never raises: Serve would stop the ingress, even while it serves. Returns before
        everything is loaded, once the ingress serves anything: Serve passes the next configuration only then, and that
        one may revoke a key.
        """
        change = self._keep(self._service.reconfigure(user_config))
        served = self._keep(self._service.served.wait())
        await asyncio.wait([change, served], return_when=asyncio.FIRST_COMPLETED)
        served.cancel()
        # This call starts the readiness watch, so that the state is known at the first probe.
        await self._replicas.readiness(set(self._service.settings.catalog.apps.values()))

    def _keep(self, change: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.get_running_loop().create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    def check_health(self) -> None:
        """Serve calls this after `reconfigure`, before a replica counts as running, and then every second. An ingress
        that never had a key would answer 401 to every valid key. So this raises `ConfigRefused`, and Serve shows it as
        the reason of the failed deployment.
        """
        join_serve_logs()
        REPLICA_REPORTS.controller_called()
        self._metrics.refresh()
        self._service.require_configuration()

    async def __del__(self) -> None:
        """Serve awaits this once the requests have finished or timed out."""
        for change in self._changes:
            change.cancel()
        if self._status_requests is not None:
            await self._status_requests.close()
        await self._node_metrics.close()
        await self._replicas.close()
        await self._watch.close()
        if self._listener is not None:
            await self._listener.close()
        await self._service.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _open_store(self, config: CheckpointsConfig) -> CheckpointStore:
        """Raises `ConfigRefused`."""
        store = CheckpointStore.of(config)
        self._metrics.store.watch(lambda: store.counters)
        return store

    def _open_ledger(self, config: LedgerConfig) -> Ledger:
        """Raises `ConfigRefused`."""
        return Ledger.of(config, self._metrics.ledger.reporter())


def _open_images(config: ImagesConfig) -> RayImages:
    return RayImages(config.app, timeout_s=config.timeout_s)
