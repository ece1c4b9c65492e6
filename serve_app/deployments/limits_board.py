"""The board of the limits in Ray: a small named actor, off the way of requests.

The first ingress that asks for it starts it, and it ends with that ingress. The next one to ask starts another.
"""

import asyncio
from typing import Any

import ray

from serve_app.access.sharing.board import Board, Hearing, Telling

BOARD_NAMESPACE = "serve"


def board_name(app: str) -> str:
    return f"roundhouse-limits-{app}"


class RayBoard:
    """`exchange` is a `shared_limits.Exchange`."""

    def __init__(self, app: str) -> None:
        """`app`: the application of the ingresses that share limits."""
        self._name = board_name(app)
        self._found: asyncio.Future[Any] | None = None  # Ray is not typed

    async def exchange(self, telling: Telling) -> Hearing:
        """Raises any error of Ray; the next call looks for the actor again. A call that is cancelled loses nothing: to
        start the actor takes longer than an exchange may, and Ray ends one whose handle is dropped.
        """
        if self._found is None:
            self._found = asyncio.ensure_future(asyncio.to_thread(self._find))
        try:
            actor = await asyncio.shield(self._found)
            hearing: Hearing = await actor.exchange.remote(telling)
        except Exception:
            self._found = None
            raise
        return hearing

    def _find(self) -> Any:
        options = {"name": self._name, "namespace": BOARD_NAMESPACE, "get_if_exists": True, "num_cpus": 0}
        return ray.remote(Board).options(**options).remote()
