"""Coroutines that run in a callback until they wait, and what comes from an upstream while one does."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from serve_app.marketplace.flow import Connector, flow, started
from tests.support.marketplace.upstream import Upstream as Server
from tests.support.marketplace.upstream_replies import Stream

pytest_plugins = ("tests.support.marketplace.upstream_fixtures",)


def test_what_does_not_wait_has_ended_at_once() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    assert started(work()) is None
    assert done == [1]


def test_what_fails_before_it_waits_raises_at_once() -> None:
    async def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        started(work())


def begun(work: Coroutine[Any, Any, None]) -> Awaitable[None]:
    rest = started(work)
    assert rest is not None
    return rest


def test_the_rest_of_what_waits_runs_in_the_task_that_awaits_it() -> None:
    async def run() -> list[object]:
        gate, seen = asyncio.Event(), list[object]()

        async def work() -> None:
            seen.append("begun")
            await gate.wait()
            await asyncio.sleep(0)
            seen.append(asyncio.current_task())

        rest = begun(work())
        assert seen == ["begun"]
        asyncio.get_running_loop().call_soon(gate.set)
        await rest
        return [*seen, asyncio.current_task()]

    first, ran_in, task = asyncio.run(run())
    assert (first, ran_in) == ("begun", task)


def test_a_cancellation_and_a_failure_reach_what_waits_and_come_back() -> None:
    async def run() -> list[str]:
        seen: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async def await_it() -> None:
            await begun(work())

        waiting = asyncio.create_task(await_it())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled()

        async def fail() -> None:
            await asyncio.sleep(0)
            raise ValueError("later")

        with pytest.raises(ValueError, match="later"):
            await begun(fail())
        return seen

    assert asyncio.run(run()) == ["cancelled"]


@asynccontextmanager
async def asked(server: Server) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "m", "stream": True}
    async with (
        aiohttp.ClientSession(connector=Connector()) as session,
        session.post(f"{server.url}/completions", json=body) as response,
    ):
        yield response


def test_while_a_step_is_waited_for_nothing_is_read(server: Server) -> None:
    """And what comes meanwhile is there afterwards."""
    server.behaves(Stream(texts=("a", "b", "c"), wait_before=(1, 2)))

    async def run() -> list[bytes]:
        pieces: list[bytes] = []
        async with asked(server) as response:

            async def wait() -> None:
                server.release(2)
                while not response.content.is_eof():  # noqa: ASYNC110 - what it waits for has no event
                    await asyncio.sleep(0.001)

            def step() -> Awaitable[None] | bool:
                if piece := response.content.read_nowait():
                    pieces.append(piece)
                    return wait()
                return True

            await flow(response, step)
            assert b"[DONE]" in await response.content.read()
        return pieces

    (piece,) = asyncio.run(run())
    assert piece.count(b"data: ") == 1


def test_what_a_step_raises_is_raised(server: Server) -> None:
    async def run() -> None:
        def step() -> bool:
            raise ValueError("this")

        async with asked(server) as response:
            await flow(response, step)

    server.behaves(Stream(wait_before=(1,)))
    with pytest.raises(ValueError, match="this"):
        asyncio.run(run())


def test_a_reply_that_is_there_in_full_is_not_waited_for(server: Server) -> None:
    async def run() -> bytes:
        async with asked(server) as response:
            content = await response.content.read()
            await flow(response, lambda: True)
            return content

    assert asyncio.run(run()).endswith(b"data: [DONE]\n\n")
