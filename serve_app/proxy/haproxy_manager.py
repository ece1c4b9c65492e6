"""Runs Serve's HAProxy with our configuration and restarts it when it dies.

`install` runs in Serve's controller before it starts a proxy (`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`), and
replaces Serve's manager by ours. The overridden methods are private to Ray 2.60, to which the package is pinned. If the
template has changed, the start fails with `TemplateChanged`.
"""

import asyncio
import logging
import resource
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import constants, controller, haproxy

from serve_app.config.proxy import ProxyConfig, read_proxy_config
from serve_app.proxy.error_pages import write_pages
from serve_app.proxy.haproxy_config import Hardening, Route, harden

logger = logging.getLogger(constants.SERVE_LOGGER_NAME)

_FILES_PER_CONNECTION = 2  # towards the client and towards the ingress
_OTHER_FILES = 1000  # pipes, listeners, servers, threads
_RESTART_DELAY_S = 0.2


def install() -> None:
    """`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`. Without HAProxy there is nothing to do."""
    if constants.RAY_SERVE_ENABLE_HA_PROXY:
        read_proxy_config()  # an error ends the controller here, with its message
        controller.HAProxyManager = ray.remote(num_cpus=0)(HAProxyManager)


class HardenedHAProxy(haproxy.HAProxyApi):  # type: ignore[misc]  # Ray is not typed
    """Serve's handle on the HAProxy process of a node."""

    def __init__(self, *args: Any, proxy_config: ProxyConfig | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._proxy_config = proxy_config or read_proxy_config()
        self._pages = write_pages(Path(self.config_file_path).parent / "pages")
        self._is_stopping = False

    def _generate_config_file_internal(self) -> None:
        super()._generate_config_file_internal()
        path = Path(self.config_file_path)
        path.write_text(harden(path.read_text(), self._hardening()))

    async def start(self) -> None:
        """If a dead manager left its HAProxy running, that one serves until the new one has its ports and routes."""
        if orphans := self._orphans():
            self._proc = await self._start_and_wait_for_haproxy("-sf", *orphans)
        else:
            await super().start()

    async def stop(self) -> None:
        self._is_stopping = True
        await super().stop()

    async def restart_when_it_dies(self, reloading: asyncio.Lock) -> None:
        """Runs until `stop`. Serve alone would need 30 s to notice, and would lose the routes."""
        while not self._is_stopping:
            process = self._proc
            await process.wait()
            async with reloading:  # a reload ends a process too, and has replaced it already
                while self._proc is process and not self._is_stopping:
                    logger.error("HAProxy (pid=%d) ended with status %s.", process.pid, process.returncode)
                    await self._start_again()

    async def _start_again(self) -> None:
        try:
            self._proc = await self._start_and_wait_for_haproxy()
        except Exception:
            logger.exception("HAProxy could not be restarted.")
            await asyncio.sleep(_RESTART_DELAY_S)

    def _orphans(self) -> list[str]:
        return [entry.name for entry in Path("/proc").glob("[0-9]*") if self._is_our_haproxy(int(entry.name))]

    def _hardening(self) -> Hardening:
        config, options = self._proxy_config, self.cfg
        port = config.health_port
        routes = [_route(backend) for backend in self.backend_configs.values() if backend.protocol == _HTTP]
        return Hardening(
            pages=self._pages,
            max_connections=min(options.maxconn, _connections_by_files()),
            connections_per_source=config.connections_per_source,
            health_address=None if port is None else f"{options.frontend_host}:{port}",
            routes=routes,
        )


_HTTP = haproxy.RequestProtocol.HTTP


def _route(backend: Any) -> Route:
    return Route(
        backend.name,
        backend.path_prefix or "/",
        {server.name: f"{server.host}:{server.port}" for server in backend.servers},
    )


def _connections_by_files() -> int:
    """The number of connections that the limit on open files allows: HAProxy does not start with more."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 20
    return max(1, (most - _OTHER_FILES) // _FILES_PER_CONNECTION)


class HAProxyManager(haproxy.HAProxyManager.__ray_actor_class__):  # type: ignore[misc]  # Ray is not typed
    """The actor that Serve runs on each node."""

    def __init__(self, *args: Any, **options: Any) -> None:
        haproxy.HAProxyApi = HardenedHAProxy  # created by the next line
        super().__init__(*args, **options)
        self._restarting = self.event_loop.create_task(self._restart_when_it_dies())

    async def _restart_when_it_dies(self) -> None:
        await self._haproxy_start_task
        await self._haproxy.restart_when_it_dies(self._reload_lock)
