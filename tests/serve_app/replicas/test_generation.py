"""The seam to the engines: local replicas, the first token, and what ends a generation."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from itertools import accumulate
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.fake import FakeConfig, FakeEngine
from engines.interface.errors import EngineStopped, QueueFull
from engines.interface.protocol import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from serve_app.api.answer import affinity_of
from serve_app.base.errors import ClientTooSlow, FirstTokenTimeout, NoReplica, ReplicaLost
from serve_app.base.workers import Workers
from serve_app.replicas.generation import open_generation
from serve_app.replicas.in_process import LocalReplicas
from serve_app.replicas.token_gaps import BOUNDS_S, TokenGaps
from serve_app.replicas.unread import MAX_WEIGHT

T = TypeVar("T")


def request(request_id: str = "r", max_tokens: int = 5, prompt: tuple[int, ...] = (1, 2)) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0))


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def started(**config: Any) -> tuple[FakeEngine, LocalReplicas]:
    engine = FakeEngine(FakeConfig(**config))
    await engine.start()
    return engine, LocalReplicas({"app": engine}, stalled_after_s=0.02)


def test_a_generation_is_read_to_its_finish_reason() -> None:
    async def work() -> list[TokenDelta]:
        engine, replicas = await started()
        found = [delta async for delta in replicas.generate("app", request(), affinity="")]
        assert replicas.open_streams == 0
        await engine.close()
        return found

    found = run(work())
    assert [delta.finish_reason for delta in found] == [None] * 4 + [FinishReason.LENGTH]


def test_what_waits_for_a_slow_reader_is_merged() -> None:
    async def work() -> list[TokenDelta]:
        engine, replicas = await started()
        async with aclosing(replicas.generate("app", request(max_tokens=50), affinity="")) as deltas:
            first = await anext(deltas)
            while engine.stats().running:  # noqa: ASYNC110 - a reader that does something else
                await asyncio.sleep(0)
            rest = [delta async for delta in deltas]
        await engine.close()
        return [first, *rest]

    found = run(work())
    assert len(found) == 2
    assert sum(len(delta.token_ids) for delta in found) == 50
    assert found[-1].finish_reason is FinishReason.LENGTH


def test_closing_a_generation_aborts_it() -> None:
    async def work() -> int:
        engine, replicas = await started()
        deltas = replicas.generate("app", request(max_tokens=1000), affinity="")
        await anext(deltas)
        await deltas.aclose()
        stats = engine.stats()
        assert replicas.open_streams == 0
        await engine.close()
        return stats.running + stats.waiting

    assert run(work()) == 0


@pytest.mark.parametrize(("deployment", "error"), [("other", NoReplica), ("app", QueueFull)])
def test_what_cannot_begin_is_told_at_the_first_token(deployment: str, error: type[Exception]) -> None:
    async def work() -> None:
        engine, replicas = await started(max_running=1, max_waiting=0)
        async with aclosing(replicas.generate("app", request("a", max_tokens=1000), affinity="")) as running:
            await anext(running)
            with pytest.raises(error):
                await anext(replicas.generate(deployment, request("b"), affinity=""))
            assert replicas.open_streams == 1
        await engine.close()

    run(work())


def test_an_engine_that_is_closed_ends_its_generations_with_an_error() -> None:
    async def work() -> None:
        engine, replicas = await started()
        deltas = replicas.generate("app", request(max_tokens=1000), affinity="")
        await anext(deltas)
        await engine.close()
        with pytest.raises(EngineStopped):
            async for _ in deltas:
                pass

    run(work())


def test_readiness_is_progress() -> None:
    async def work() -> list[str | None]:
        engine, replicas = await started()
        found = [(await replicas.readiness(["app"]))["app"], (await replicas.readiness(["other"]))["other"]]
        engine.pause()
        deltas = replicas.generate("app", request(), affinity="")
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0.05)
        found.append((await replicas.readiness(["app"]))["app"])
        engine.resume()
        await waiting
        await deltas.aclose()
        found.append((await replicas.readiness(["app"]))["app"])
        await engine.close()
        found.append((await replicas.readiness(["app"]))["app"])
        return found

    assert run(work()) == [
        None,
        "it is not running",
        "its engine has made no progress for 0 s",
        None,
        "its engine has failed",
    ]


async def emits(*deltas: TokenDelta) -> AsyncGenerator[TokenDelta, None]:
    for delta in deltas:
        yield delta


def test_a_stream_that_just_stops_is_a_lost_replica() -> None:
    async def work() -> None:
        with pytest.raises(ReplicaLost):
            async with open_generation(emits(), 1, TokenGaps()):
                pass
        with pytest.raises(ReplicaLost):
            async with open_generation(emits(TokenDelta((1,))), 1, TokenGaps()) as generation:
                await generation.next()

    run(work())


def test_the_tokens_after_the_first_are_counted_by_how_far_apart_they_come() -> None:
    gaps = TokenGaps()

    async def work() -> None:
        deltas = [TokenDelta((1, 2)), TokenDelta((3,)), TokenDelta(()), TokenDelta((4, 5, 6))]
        async with open_generation(emits(*deltas), 1, gaps) as generation:
            for _ in deltas[1:]:
                await generation.next()

    began_at = time.monotonic()
    run(work())
    assert sum(gaps.counts) == 4
    assert 0 < gaps.total_s <= time.monotonic() - began_at


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50))))
def test_a_token_counts_once_below_the_first_bound_that_its_gap_does_not_exceed(added: list[tuple[float, int]]) -> None:
    gaps = TokenGaps()
    for seconds, num_tokens in added:
        gaps.add(seconds, num_tokens)
    each = [seconds / num_tokens for seconds, num_tokens in added for _ in range(num_tokens)]
    below = [sum(gap <= bound for gap in each) for bound in BOUNDS_S]
    assert list(accumulate(gaps.counts)) == [*below, len(each)]
    assert gaps.total_s == sum(seconds for seconds, num_tokens in added if num_tokens)


def test_the_first_token_has_a_time_limit_and_the_others_have_not() -> None:
    async def slow() -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta((1,))
        await asyncio.sleep(0.05)
        yield TokenDelta((2,), finish_reason=FinishReason.LENGTH)

    async def never(ended: list[bool]) -> AsyncGenerator[TokenDelta, None]:
        try:
            await asyncio.sleep(60)
            yield TokenDelta((1,))
        finally:
            ended.append(True)

    async def work() -> None:
        async with open_generation(slow(), 0.02, TokenGaps()) as generation:
            assert (await generation.next()).token_ids == (2,)
        ended: list[bool] = []
        with pytest.raises(FirstTokenTimeout, match=r"^No token came within 0\.02 s; try again\.$"):
            async with open_generation(never(ended), 0.02, TokenGaps()):
                pass
        assert ended == [True]

    run(work())


def test_requests_with_a_cache_key_or_a_beginning_in_common_have_one_affinity() -> None:
    long = tuple(range(100))
    assert affinity_of("k", request(prompt=(1,))) == affinity_of("k", request(prompt=(2,)))
    assert affinity_of("k", request()) != affinity_of("l", request())
    assert affinity_of("", request(prompt=long)) == affinity_of("", request(prompt=(*long, 7, 8)))
    assert affinity_of("", request(prompt=(5, *long))) != affinity_of("", request(prompt=long))


def test_short_work_is_done_at_once_and_long_work_elsewhere() -> None:
    async def work() -> list[str]:
        workers = Workers()

        def name() -> str:
            return threading.current_thread().name

        found = [await workers.run(cost, name) for cost in (10, 50_000, 500_000)]
        workers.close()
        return found

    inline, common, large = run(work())
    assert inline == "MainThread"
    assert common.startswith("work")
    assert large.startswith("large-work")


def test_long_work_does_not_wait_for_large_work() -> None:
    async def work() -> None:
        workers = Workers()
        release = threading.Event()
        large = [asyncio.ensure_future(workers.run(1e6, release.wait)) for _ in range(8)]
        async with asyncio.timeout(5):
            assert await workers.run(50_000, lambda: 7) == 7
        release.set()
        await asyncio.gather(*large)
        workers.close()

    run(work())


@pytest.mark.parametrize("logprobs", [None, 20])
def test_a_reader_that_does_not_read_is_held_a_bounded_number_of_tokens(logprobs: int | None) -> None:
    """Also behind Serve's own streams, where this runs in a replica."""
    most = 4 * MAX_WEIGHT
    sampling = SamplingParams(max_tokens=most, seed=0, logprobs=logprobs)

    async def work() -> int:
        engine, replicas = await started(context_length=2 * most, kv_capacity_tokens=2 * most)
        async with aclosing(replicas.generate("app", GenerateRequest("r", (1, 2), sampling), affinity="")) as deltas:
            await anext(deltas)
            async with asyncio.timeout(120):
                while engine.stats().running:  # noqa: ASYNC110 - a reader that does something else
                    await asyncio.sleep(0)
            held = await anext(deltas)
            with pytest.raises(ClientTooSlow, match=r"^The client reads too slowly: \d+ deltas are unread\.$"):
                await anext(deltas)
        assert replicas.open_streams == 0
        await engine.close()
        return len(held.token_ids)

    assert run(work()) == 1 + MAX_WEIGHT // (1 if logprobs is None else 2 + logprobs)
