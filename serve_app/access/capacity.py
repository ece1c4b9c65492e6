"""How many requests one ingress has under way."""

from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.errors import Overloaded


class Capacity:
    """Bounds the requests of this process, those of all keys together. Nobody waits: who finds no place is told so."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_running = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request for as long as the context lasts. Raises `Overloaded`; then nothing was counted."""
        if self.num_running >= self._max_requests:
            raise Overloaded("The service has as many requests under way as it may; try again.")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
