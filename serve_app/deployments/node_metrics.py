"""The metrics of the whole service in one reply, for `GET /metrics`: what every node of the cluster exports of it.

Ray's agent on each node exports the metrics of all processes there. So an ingress asks the agents, and each replica of
the service is seen, whichever ingress was asked.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import ray

logger = logging.getLogger(__name__)

NODE_UP: Final = "ray_roundhouse_node_up"
_OURS: Final = ("ray_roundhouse_", "ray_serve_")
_TIMEOUT_S: Final = 5.0  # Prometheus itself gives up after 10


def ray_nodes() -> list[str]:
    """The addresses at which the nodes that are alive export metrics. Blocks for milliseconds."""
    alive = (node for node in ray.nodes() if node["Alive"])
    return [_address(node["NodeManagerAddress"], node["MetricsExportPort"]) for node in alive]


class NodeMetrics:
    """Reads the nodes' metrics. Callers at the same time share one reading. `close` it."""

    def __init__(self, list_nodes: Callable[[], Iterable[str]] = ray_nodes, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._list_nodes = list_nodes
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._reading: asyncio.Task[bytes] | None = None

    async def read(self) -> bytes:
        """In Prometheus' text format. A node that does not answer within the time limit is left out, and named as
        `NODE_UP` 0.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())
        return await asyncio.shield(self._reading)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})

    async def _read(self) -> bytes:
        nodes = await asyncio.to_thread(self._list_nodes)
        async with aiohttp.ClientSession(timeout=self._timeout) as session:
            found = dict(await asyncio.gather(*(_of_node(session, node) for node in sorted(nodes))))
        return await asyncio.to_thread(lambda: merge(found).encode())


async def _of_node(session: aiohttp.ClientSession, node: str) -> tuple[str, str | None]:
    try:
        async with session.get(f"http://{node}/metrics", raise_for_status=True) as response:
            return node, await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as exc:
        logger.warning("The metrics of the node at %s cannot be read: %s", node, exc or type(exc).__name__)
        return node, None


@dataclass(slots=True)
class _Family:
    """A metric: what is said about it, the same for all nodes, and its samples."""

    about: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def merge(texts: Mapping[str, str | None]) -> str:
    """The service's metrics of all nodes as one text, with the samples of each metric together. `texts`: by node; None:
    it did not answer.
    """
    families: dict[str, _Family] = {}
    for text in texts.values():
        _add(families, text or "")
    lines = [f"# HELP {NODE_UP} 1 for a node whose metrics are among these.", f"# TYPE {NODE_UP} gauge"]
    lines += [f'{NODE_UP}{{node="{node}"}} {int(text is not None)}' for node, text in texts.items()]
    for family in families.values():
        lines += [*family.about.values(), *family.samples]
    return "\n".join(lines) + "\n"


def _add(families: dict[str, _Family], text: str) -> None:
    family: _Family | None = None
    for line in text.split("\n"):  # nothing else ends a line: a label may hold other separators
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *_ = line.split(" ", 3)
            family = families.setdefault(name, _Family()) if name.startswith(_OURS) else None
            if family is not None:
                family.about.setdefault(kind, line)
        elif family is not None and line:
            family.samples.append(line)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
