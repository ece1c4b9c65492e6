"""Tells a replica's status to every ingress that asked for it, each over its own connection."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from serve_app.replicas.channel.link import Link, Links
from serve_app.replicas.channel.listener import Endpoint
from serve_app.replicas.status import STATUS_BEAT_S, STATUS_GAP_S, STATUS_LOOK_S, Status


@dataclass(slots=True)
class _Ingress:
    """An ingress that asked. `app` and `replica_id`: its name for this replica."""

    link: Link
    app: str
    replica_id: str
    last: Status | None = None
    told_at: float = 0.0

    def tell(self, now: Status) -> None:
        """Tell what has changed, or that nothing has if that was not told for long."""
        load = replace(now.load, others=now.load.others - self.link.open_streams)
        status = replace(now, app=self.app, replica_id=self.replica_id, load=load)
        if status != self.last or time.monotonic() - self.told_at >= STATUS_BEAT_S:
            self.link.tell(status.after(self.last))
            self.last, self.told_at = status, time.monotonic()


class StatusSender:
    """Tells each ingress, from the running event loop, as often as `status.py` says. `close` it."""

    def __init__(self, links: Links, read: Callable[[], Status]) -> None:
        """`read`: the status now. Its names do not count, and all requests count as those of others."""
        self._links = links
        self._read = read
        self._ingresses: dict[Endpoint, _Ingress] = {}
        self._has_news = asyncio.Event()
        self._telling = asyncio.get_running_loop().create_task(self._run())

    @property
    def has_listeners(self) -> bool:
        return any(not ingress.link.is_lost for ingress in self._ingresses.values())

    async def add(self, endpoint: Endpoint, app: str, replica_id: str) -> None:
        """Tell this ingress from now on, until its connection is lost. Raises `ReplicaLost` when it cannot be
        reached. An ingress that asks again is told everything again.
        """
        link = await self._links.to(endpoint)
        ingress = self._ingresses[endpoint] = _Ingress(link, app, replica_id)
        ingress.tell(self._read())

    def tell_soon(self) -> None:
        """There is a new request: other ingresses would send more until they hear of it."""
        self._has_news.set()

    async def close(self) -> None:
        self._telling.cancel()
        with suppress(asyncio.CancelledError):
            await self._telling

    async def _run(self) -> None:
        while True:
            self._ingresses = {to: ingress for to, ingress in self._ingresses.items() if not ingress.link.is_lost}
            if self._ingresses:
                now = self._read()
                for ingress in self._ingresses.values():
                    ingress.tell(now)
            await asyncio.sleep(STATUS_GAP_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_LOOK_S - STATUS_GAP_S):
                    await self._has_news.wait()
            self._has_news.clear()
