"""One model replica, without Ray around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from engines.fake import FakeEngine
from engines.interface.protocol import Adapter, GenerateRequest, SamplingParams
from serve_app.config.model import parse_model_args
from serve_app.deployments.replica import EngineUnhealthy, Replica
from serve_app.replicas.channel.listener import Listener
from serve_app.replicas.reports import Report
from serve_app.replicas.status import Status, pack_adapters
from tests.support.waiting import until

FAST = {"step_s": 0.0, "reply_tokens": None, "vocab_size": 500}


class Collectable(Replica):
    """Serve awaits the destructor; Python itself, which is to collect this one, cannot."""

    def __del__(self) -> None:
        pass


@contextlib.asynccontextmanager
async def replica(**args: object) -> AsyncIterator[Replica]:
    """As Serve constructs it and takes it down."""
    made = Collectable.__new__(Collectable)
    await made.__init__(parse_model_args({"id": "m", "source": "x", "engine": "fake", "fake": FAST, **args}))
    try:
        yield made
    finally:
        await made.close()


def run(test: Callable[[Replica], Awaitable[None]], **args: object) -> None:
    async def main() -> None:
        async with replica(**args) as made:
            await asyncio.wait_for(test(made), 20)

    asyncio.run(main())


def engine_of(made: Replica) -> FakeEngine:
    assert isinstance(made._engine, FakeEngine)
    return made._engine


def request(max_tokens: int = 5, request_id: str = "r") -> GenerateRequest:
    return GenerateRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=max_tokens, seed=1))


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_two_requests_with_one_id_do_not_meet():
    async def test(made: Replica) -> None:
        listener = await Listener.start("127.0.0.1")
        streams = [listener.open(), listener.open()]
        calls = [made.run(request(), listener.endpoint, stream.stream_id) for stream in streams]
        await asyncio.gather(*calls)
        for stream in streams:
            assert len((await stream.receive()).token_ids) == 5
            stream.close()
        assert made.record_autoscaling_stats()["streams"] == 0
        await listener.close()

    run(test)


def test_the_same_tokens_come_as_a_serve_stream():
    async def test(made: Replica) -> None:
        deltas = [delta async for delta in made.generate(request())]
        assert sum(len(delta.token_ids) for delta in deltas) == 5
        assert made.record_autoscaling_stats()["streams"] == 0

    run(test)


def test_closing_a_serve_stream_ends_its_generation():
    async def test(made: Replica) -> None:
        deltas = made.generate(request(30_000))
        await anext(deltas)
        assert made.record_autoscaling_stats()["streams"] == 1
        await deltas.aclose()
        assert made.record_autoscaling_stats()["streams"] == 0
        assert made.record_autoscaling_stats()["running"] == 0

    run(test)


def test_an_engine_that_makes_no_progress_is_not_ready_and_then_unhealthy():
    async def test(made: Replica) -> None:
        engine = engine_of(made)
        made.check_health()
        assert made.record_routing_stats()["is_ready"] is True
        engine.pause()
        deltas = made.generate(request(100))
        waiting = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0.06)
        assert made.record_routing_stats()["is_ready"] is False
        made.check_health()
        made.reconfigure({"stalled_after_s": 0.01, "restart_after_s": 0.02})
        with pytest.raises(EngineUnhealthy, match="no progress"):
            made.check_health()
        engine.resume()
        await waiting
        await deltas.aclose()
        made.check_health()

    run(test, health={"stalled_after_s": 0.05, "restart_after_s": 1000})


def test_a_report_changes_with_time_and_not_with_the_order_in_which_adapters_are_used():
    async def test(made: Replica) -> None:
        digests = [f"{n}" * 64 for n in range(3)]
        for digest in (*digests, *digests[::-1]):
            adapter = Adapter(digest, "/nowhere")
            async for _ in made.generate(replace(request(), adapter=adapter)):
                pass
        first = Report.of(made.record_routing_stats())
        assert (first.is_ready, first.adapters, first.good_for_s) == (True, pack_adapters(digests), 6.5)
        made.reconfigure({"silent_after_s": 9})
        assert Report.of(made.record_routing_stats()).good_for_s == 9
        async with asyncio.timeout(10):
            while Report.of(made.record_routing_stats()).beat == first.beat:  # noqa: ASYNC110 - it is time that it tells
                await asyncio.sleep(0.05)

    run(test, health={"silent_after_s": 6.5})


def test_while_an_ingress_listens_its_report_through_serve_does_not_change():
    async def test(made: Replica) -> None:
        told: list[Status] = []
        listener = await Listener.start("127.0.0.1", on_status=told.append)
        await made.tell_status(listener.endpoint, "app", "id")
        assert made.record_routing_stats() == Report().fields()
        with_adapter = replace(request(), adapter=Adapter("digest", "/nowhere"))
        await made.run(with_adapter, listener.endpoint, listener.open().stream_id)
        assert made.record_routing_stats() == Report().fields()
        await until(lambda: any(status.adapters == pack_adapters(["digest"]) for status in told))
        assert {(status.app, status.replica_id, status.good_for_s) for status in told} == {("app", "id", 6.5)}
        await listener.close()
        await until(lambda: made.record_routing_stats()["good_for_s"] == 6.5)
        assert Report.of(made.record_routing_stats()).adapters == pack_adapters(["digest"])

    run(test, health={"silent_after_s": 6.5})


def test_an_ingress_that_streams_over_serve_gets_the_whole_report_though_another_one_listens():
    async def test(made: Replica) -> None:
        listener = await Listener.start("127.0.0.1")
        await made.tell_status(listener.endpoint, "app", "id")
        async for _ in made.generate(replace(request(), adapter=Adapter("digest", "/nowhere"))):
            pass
        report = Report.of(made.record_routing_stats())
        assert (report.adapters, report.good_for_s) == (pack_adapters(["digest"]), 6.5)
        await listener.close()

    run(test, health={"silent_after_s": 6.5})


def test_its_load_is_told_with_the_requests_of_others_apart():
    async def test(made: Replica) -> None:
        told: list[Status] = []
        one, two = await Listener.start("127.0.0.1", on_status=told.append), await Listener.start("127.0.0.1")
        await made.tell_status(one.endpoint, "app", "id")
        engine_of(made).pause()
        mine, *others = [one.open(), two.open(), two.open()]
        calls = [
            made.run(request(), listener.endpoint, stream.stream_id)
            for listener, stream in ((one, mine), (two, others[0]), (two, others[1]))
        ]
        running = asyncio.gather(*calls)
        await until(lambda: bool(told) and told[-1].load.others == 2)
        load = told[-1].load
        assert (load.running + load.waiting, load.queued_tokens, load.total_blocks > 0) == (3, 9, True)
        engine_of(made).resume()
        await running
        await until(lambda: told[-1].load.others == told[-1].load.queued_tokens == 0)
        await one.close()
        await two.close()

    run(test)


def test_an_engine_that_has_failed_is_unhealthy():
    async def test(made: Replica) -> None:
        await engine_of(made).close()
        with pytest.raises(EngineUnhealthy, match="failed"):
            made.check_health()
        assert made.record_routing_stats()["is_ready"] is False

    run(test)


@pytest.mark.parametrize("user_config", [{"stalled_after_s": -1}, {"nonsense": 1}, None, []])
def test_a_bad_user_config_is_refused_without_raising(user_config, caplog):
    async def test(made: Replica) -> None:
        before = made._limits
        made.reconfigure(user_config)
        assert made._limits == before

    run(test)


def test_what_autoscaling_may_look_at():
    async def test(made: Replica) -> None:
        engine_of(made).pause()
        streams = [made.generate(request(50)) for _ in range(3)]
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await turns()
        stats = made.record_autoscaling_stats()
        assert stats["running"] + stats["waiting"] == 3
        engine_of(made).resume()
        await asyncio.gather(*first)
        assert made.record_autoscaling_stats()["kv_used_fraction"] > 0
        for stream in streams:
            await stream.aclose()

    run(test)
