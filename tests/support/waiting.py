"""Waiting for what happens in its own time."""

import asyncio
import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Return as soon as the condition holds; fail if it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


async def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """The same on an event loop."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)
