"""The HAProxy that Serve runs, without Serve: in front of a small application, on free ports."""

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from ray.serve._private.haproxy import BackendConfig, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.types import ASGIApp

from serve_app.config.deploy import free_port
from serve_app.config.proxy import ProxyConfig
from serve_app.proxy.haproxy_manager import HardenedHAProxy


@dataclass
class Proxy:
    """A running HAProxy; `api` is Serve's handle on it, which lives on the loop of `run`."""

    port: int
    health_port: int
    stats_port: int
    metrics_port: int
    api: HardenedHAProxy
    loop: asyncio.AbstractEventLoop
    reloading: asyncio.Lock

    def succeed(self) -> HardenedHAProxy:
        """What the next manager does when this one has died: it knows no routes yet. The caller stops it."""

        async def start() -> HardenedHAProxy:
            next_one = HardenedHAProxy(self.api.cfg, {}, self.api.config_file_path, proxy_config=ProxyConfig())
            await next_one.start()
            return next_one

        return asyncio.run_coroutine_threadsafe(start(), self.loop).result(60)

    def stop(self, api: HardenedHAProxy) -> None:
        asyncio.run_coroutine_threadsafe(api.stop(), self.loop).result(30)

    def reload(self) -> None:
        """As Serve's manager does."""

        async def reload() -> None:
            async with self.reloading:
                await self.api.reload()

        asyncio.run_coroutine_threadsafe(reload(), self.loop).result(30)


@contextlib.contextmanager
def running_app(app: ASGIApp) -> Iterator[int]:
    """The application in uvicorn, on a thread; yields its port."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", http="httptools", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def running_proxy(
    servers: Mapping[str, int],
    *,
    has_routes: bool = True,
    restarts: bool = True,
    maxconn: int = 4096,
    **options: int,
) -> Iterator[Proxy]:
    """In front of what listens on these ports of this machine, as the application at "/"."""
    folder = Path(tempfile.mkdtemp(prefix="rh-", dir="/tmp"))  # sockets' paths must be short
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    ports = [free_port() for _ in range(4)]
    config = ProxyConfig(health_port=ports[1], **options)
    backend = BackendConfig(
        name="http-api",
        path_prefix="/",
        app_name="api",
        servers=[ServerConfig(name, "127.0.0.1", port) for name, port in servers.items()],
    )
    settings = HAProxyConfig(
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        stats_port=ports[2],
        metrics_port=ports[3],
        metrics_enabled=False,
        has_received_routes=has_routes,
        is_head=True,
        maxconn=maxconn,
        http_health_check_path="/healthz",
        http_options=HTTPOptions(host="127.0.0.1", port=ports[0]),
    )

    reloading = asyncio.Lock()
    watches: list[asyncio.Task[None]] = []

    async def make() -> HardenedHAProxy:
        api = HardenedHAProxy(
            settings, {"http-api": backend} if has_routes else {}, str(folder / "haproxy.cfg"), proxy_config=config
        )
        await api.start()
        if restarts:
            watches.append(loop.create_task(api.restart_when_it_dies(reloading)))
        return api

    async def end() -> None:
        await api.stop()
        await asyncio.gather(*watches)

    api = None
    try:
        api = asyncio.run_coroutine_threadsafe(make(), loop).result(60)
        yield Proxy(*ports, api, loop, reloading)
    finally:
        if api is not None:
            asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        shutil.rmtree(folder)
