"""Ports at which nobody answers."""

import contextlib
import select
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port that refuses every connection, and that nobody else gets meanwhile."""
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port whose connections are never answered: the queue of those that nobody accepted is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            filler = stack.enter_context(contextlib.closing(socket.socket()))
            filler.setblocking(False)
            filler.connect_ex(listening.getsockname())
            if not select.select([], [filler], [], 0.2)[1]:
                break
        yield listening.getsockname()[1]
