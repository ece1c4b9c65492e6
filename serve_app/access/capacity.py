"""The number of requests that one ingress runs at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from serve_app.base.errors import Overloaded


class Capacity:
    """Bounds the requests of this process, over all keys. A request over the bound is refused at once; none waits."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self.num_running = 0

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request for as long as the context lasts. Raises `Overloaded`; then nothing was counted."""
        if self.num_running >= self._max_requests:
            raise Overloaded("The service is at its limit of requests; try again.")
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
