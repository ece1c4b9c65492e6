"""The side channel over real sockets, between an ingress and a replica with the deterministic engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.fake import FakeConfig, FakeEngine
from engines.interface.errors import EngineStopped, RequestRefused
from engines.interface.protocol import (
    FinishReason,
    GenerateRequest,
    Output,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from serve_app.base.errors import ClientTooSlow, ReplicaLost
from serve_app.replicas.channel.frames import encode_event, encode_frame, encode_hello
from serve_app.replicas.channel.link import LINK_LIMITS, LinkLimits, Links, run_request
from serve_app.replicas.channel.listener import LAST_FRAME_TIMEOUT_S, MAX_STRANGERS, Endpoint, Listener, Stream


@dataclass
class Pair:
    """An ingress and a replica. `calls` stand for the Serve calls, open for the life of a request."""

    listener: Listener
    links: Links
    engine: FakeEngine
    calls: set[asyncio.Task[None]]

    async def start(self, *, max_tokens: int = 8, request_id: str = "") -> tuple[Stream, asyncio.Task[None]]:
        stream = self.listener.open()
        call = asyncio.create_task(self._run(stream.stream_id, max_tokens, request_id or f"r{stream.stream_id}"))
        call.add_done_callback(lambda _: stream.call_ended())
        self.calls.add(call)
        return stream, call

    async def _run(self, stream_id: int, max_tokens: int, request_id: str) -> None:
        link = await self.links.to(self.listener.endpoint)
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
        await run_request(self.engine, GenerateRequest(request_id, (1, 2, stream_id), sampling), link, stream_id)

    async def is_idle(self) -> None:
        """Wait until nothing is left of any request, anywhere."""
        engine, ends = self.engine, (self.listener, self.links)
        await settled(lambda: engine.stats().running == 0 and not any(end.open_streams for end in ends))
        await asyncio.gather(*self.calls, return_exceptions=True)


@contextlib.asynccontextmanager
async def pair(
    config: FakeConfig | None = None,
    limits: LinkLimits = LINK_LIMITS,
    last_frame_timeout_s: float = LAST_FRAME_TIMEOUT_S,
) -> AsyncIterator[Pair]:
    engine = FakeEngine(config)
    await engine.start()
    listener = await Listener.start("127.0.0.1", last_frame_timeout_s=last_frame_timeout_s)
    links = Links(limits)
    try:
        yield Pair(listener, links, engine, set())
    finally:
        await links.close()
        await listener.close()
        await engine.close()


def run(
    test: Callable[[Pair], Awaitable[None]],
    config: FakeConfig | None = None,
    limits: LinkLimits = LINK_LIMITS,
    last_frame_timeout_s: float = LAST_FRAME_TIMEOUT_S,
) -> None:
    async def main() -> None:
        async with pair(config, limits, last_frame_timeout_s) as both:
            await asyncio.wait_for(test(both), 30)

    asyncio.run(main())


async def read(stream: Stream) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    while True:
        delta = await stream.receive()
        tokens += delta.token_ids
        if delta.finish_reason is not None:
            stream.close()
            return tokens


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await a_moment()


async def a_moment() -> None:
    await asyncio.sleep(0.001)


def test_each_stream_gets_the_tokens_of_its_own_request():
    async def test(both: Pair) -> None:
        started = [await both.start(max_tokens=5 + n) for n in range(10)]
        tokens = await asyncio.gather(*(read(stream) for stream, _ in started))
        assert [len(ids) for ids in tokens] == [5 + n for n in range(10)]
        assert len({ids[:5] for ids in tokens}) == 10
        await both.is_idle()

    run(test)


def test_all_requests_of_an_ingress_share_one_connection():
    async def test(both: Pair) -> None:
        streams = [(await both.start())[0] for _ in range(20)]
        await asyncio.gather(*(read(stream) for stream in streams))
        assert len(both.links._links) == len(both.listener._connections) == 1

    run(test)


def test_a_refusal_of_the_engine_arrives_as_the_error_that_it_is():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=10**6)
        with pytest.raises(RequestRefused, match="the limit is 32768") as refused:
            await stream.receive()
        assert refused.value.field == "max_tokens"
        stream.close()
        await call
        await both.is_idle()

    run(test)


def test_closing_a_stream_ends_its_generation_without_help_from_serve():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        await stream.receive()
        stream.close()
        stream.close()
        await call
        await both.is_idle()
        assert both.engine.stats().counters.aborted == 1

    run(test)


def test_a_stream_that_is_closed_before_its_first_frame_ends_the_generation_too():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        stream.close()
        await call
        await both.is_idle()

    run(test)


def test_cancelling_the_call_aborts_the_request():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        await stream.receive()
        call.cancel()
        await settled(lambda: both.engine.stats().running == 0)
        assert both.links.open_streams == 0
        stream.close()

    run(test)


def test_a_lost_connection_fails_its_open_streams_and_the_next_request_connects_anew():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        await stream.receive()
        link = await both.links.to(both.listener.endpoint)
        link._writer.transport.abort()
        with pytest.raises(ReplicaLost):
            await read(stream)
        stream.close()
        await call
        await both.is_idle()
        again, _ = await both.start(max_tokens=3)
        assert len(await read(again)) == 3

    run(test)


def test_when_the_ingress_stops_its_requests_are_aborted():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        await stream.receive()
        await both.listener.close()
        await call
        assert both.engine.stats().running == 0
        with pytest.raises(ReplicaLost):
            await read(stream)

    run(test)


def test_a_call_that_ends_without_its_last_frame_is_replica_lost():
    async def test(both: Pair) -> None:
        stream = both.listener.open()
        stream.call_ended()
        with pytest.raises(ReplicaLost, match="did not arrive"):
            await stream.receive()

    run(test, last_frame_timeout_s=0.1)


def test_an_engine_that_stops_ends_its_streams_with_its_error():
    async def test(both: Pair) -> None:
        stream, call = await both.start(max_tokens=30_000)
        await stream.receive()
        await both.engine.close()
        with pytest.raises(EngineStopped):
            await read(stream)
        stream.close()
        await call

    run(test)


def test_an_ingress_that_cannot_be_reached_is_replica_lost():
    async def test(both: Pair) -> None:
        gone = both.listener.endpoint
        await both.listener.close()
        with pytest.raises(ReplicaLost, match="cannot reach the ingress"):
            await both.links.to(gone)

    run(test)


@pytest.mark.parametrize(
    "hello", [encode_hello(b"x" * 32), encode_hello(b""), encode_hello(b"x" * 5000), b"GET / HTTP/1.1"]
)
def test_who_does_not_know_the_token_reaches_no_stream(hello):
    async def test(both: Pair) -> None:
        stream = both.listener.open()
        endpoint = both.listener.endpoint
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(hello + encode_frame([encode_event(stream.stream_id, TokenDelta((7,)))]))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        assert not stream._accepted
        writer.close()

    run(test)


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def strangers(endpoint: Endpoint, source: str = "127.0.0.1") -> list[Connection]:
    """As many connections as may be strangers, from an address of this machine. They last as long as they are held."""
    return [
        await asyncio.open_connection(endpoint.host, endpoint.port, local_addr=(source, 0))
        for _ in range(MAX_STRANGERS)
    ]


async def is_dropped(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionError):
        return await reader.read() == b""
    return True


def test_strangers_are_bounded_and_do_not_keep_replicas_out():
    async def test(both: Pair) -> None:
        held = await strangers(both.listener.endpoint)
        await settled(lambda: len(both.listener._strangers) == MAX_STRANGERS)
        stream, _ = await both.start(max_tokens=2)
        assert len(await read(stream)) == 2
        assert await is_dropped(held[0][0])
        assert len(both.listener._strangers) == MAX_STRANGERS - 1
        assert not held[1][0].at_eof()

    run(test)


def test_strangers_of_one_address_do_not_cost_another_its_place():
    async def test(both: Pair) -> None:
        endpoint = both.listener.endpoint
        slow, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        await settled(lambda: len(both.listener._strangers) == 1)
        held = [await strangers(endpoint, "127.0.0.2") for _ in range(2)]
        await settled(lambda: len(both.listener._strangers) == MAX_STRANGERS)
        stream = both.listener.open()
        writer.write(encode_hello(endpoint.token) + encode_frame([encode_event(stream.stream_id, None)]))
        await stream.accepted()
        assert not slow.at_eof()
        assert await is_dropped(held[0][0][0])
        writer.close()
        stream.close()

    run(test)


async def call(stream: Stream, links: Links, endpoint: Endpoint, engine: FakeEngine, max_tokens: int) -> None:
    """A call of Serve's: it generates for the stream, with tokens that tell the replicas apart."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0)
    request = GenerateRequest(f"r{id(links)}", (1, 2, id(links) % 1000), sampling)
    await run_request(engine, request, await links.to(endpoint), stream.stream_id)


async def alone(engine: FakeEngine, listener: Listener, links: Links, max_tokens: int) -> tuple[int, ...]:
    """What the replica generates for a stream of its own."""
    stream = listener.open()
    calling = asyncio.create_task(call(stream, links, listener.endpoint, engine, max_tokens))
    tokens = await read(stream)
    await calling
    return tokens


def test_a_stream_takes_tokens_from_the_replica_that_accepted_it_first_and_ends_the_other_ones():
    async def test(both: Pair) -> None:
        listener, engine, first, second = both.listener, both.engine, both.links, Links()
        expected = await alone(engine, listener, first, 300)
        assert expected != await alone(engine, listener, second, 300)
        stream = listener.open()
        calling = asyncio.create_task(call(stream, first, listener.endpoint, engine, 300))
        await stream.accepted()
        again = asyncio.create_task(call(stream, second, listener.endpoint, engine, 300))
        again.add_done_callback(lambda _: stream.call_ended())
        await again  # it was told to stop: it had no time for its tokens
        aborted = engine.stats().counters.aborted
        assert await read(stream) == expected
        await calling
        assert aborted == 1
        await second.close()

    run(test, FakeConfig(step_s=0.001), last_frame_timeout_s=0.1)


def test_a_call_that_is_made_twice_on_one_replica_generates_once():
    async def test(both: Pair) -> None:
        listener, engine = both.listener, both.engine
        expected = await alone(engine, listener, both.links, 50)
        taken = engine.stats().counters.requests
        stream = listener.open()
        calls = [asyncio.create_task(call(stream, both.links, listener.endpoint, engine, 50)) for _ in range(2)]
        assert await read(stream) == expected
        await asyncio.gather(*calls)
        assert engine.stats().counters.requests == taken + 1

    run(test)


def test_a_frame_that_makes_no_sense_costs_the_connection_its_streams_only():
    async def test(both: Pair) -> None:
        good, _ = await both.start(max_tokens=2000)
        await good.receive()
        bad = both.listener.open()
        endpoint = both.listener.endpoint
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(encode_hello(endpoint.token) + encode_frame([encode_event(bad.stream_id, None)]))
        await bad.accepted()
        writer.write(encode_frame([b"\xc1"]))
        with pytest.raises(ReplicaLost):
            await bad.receive()
        assert len(await read(good)) >= 1900
        writer.close()

    run(test)


def test_a_client_that_reads_too_slowly_is_cut_off_and_its_generation_ends():
    async def test(both: Pair) -> None:
        stream = both.listener.open()
        endpoint = both.listener.endpoint
        link = await both.links.to(endpoint)
        over = link.attach("slow", stream.stream_id)
        many = TokenDelta(tuple(range(50_000)))
        for _ in range(5):
            link.deliver([Output("slow", many)])
        await settled(lambda: stream.is_finished)
        assert len((await stream.receive()).token_ids) == 5 * 50_000
        with pytest.raises(ClientTooSlow, match="reads too slowly"):
            await stream.receive()
        stream.close()
        await over
        link.detach("slow")

    run(test)


def test_log_probabilities_that_fill_many_frames_arrive_whole():
    logprob = TokenLogprob(1, -1.5, tuple((n, -float(n)) for n in range(20)))
    delta = TokenDelta((1,), (logprob,), None, 0, (None, *[logprob] * 8_000))

    async def test(both: Pair) -> None:
        link = await both.links.to(both.listener.endpoint)
        streams = {f"r{n}": both.listener.open() for n in range(4)}
        for request_id, stream in streams.items():
            link.attach(request_id, stream.stream_id)
        link.deliver([Output(request_id, delta) for request_id in streams])
        for request_id, stream in streams.items():
            assert await stream.receive() == delta
            stream.close()
            link.detach(request_id)

    run(test, limits=LinkLimits(max_entry_bytes=3 << 20))


def test_log_probabilities_that_fit_no_frame_refuse_their_request_only():
    async def test(both: Pair) -> None:
        link = await both.links.to(both.listener.endpoint)
        big, small = both.listener.open(), both.listener.open()
        over = link.attach("big", big.stream_id)
        link.attach("small", small.stream_id)
        too_much = TokenDelta((1,), (), None, 0, (None, *[TokenLogprob(1, -1.0)] * 1000))
        link.deliver([Output("big", too_much), Output("small", TokenDelta((5,)))])
        assert (await small.receive()).token_ids == (5,)
        with pytest.raises(RequestRefused, match="at most 1000 can be sent"):
            await big.receive()
        await over

    run(test, limits=LinkLimits(max_entry_bytes=1000))


def test_an_ingress_that_does_not_read_loses_its_connection_instead_of_filling_memory():
    async def test(both: Pair) -> None:
        server = await asyncio.start_server(lambda reader, writer: asyncio.Event().wait(), "127.0.0.1", 0, limit=1024)
        port = server.sockets[0].getsockname()[1]
        link = await both.links.to(Endpoint("127.0.0.1", port, b"token"))
        over = link.attach("r", 1)
        chunk = TokenDelta(tuple(range(10**9, 10**9 + 100_000)))
        for _ in range(200):
            link.deliver([Output("r", chunk)])
        await over
        assert link.is_lost
        server.close()

    run(test, limits=LinkLimits(max_unsent_bytes=1 << 20))


def test_what_is_delivered_for_a_request_that_is_gone_is_dropped():
    async def test(both: Pair) -> None:
        link = await both.links.to(both.listener.endpoint)
        stream = both.listener.open()
        link.attach("r", stream.stream_id)
        link.detach("r")
        link.deliver([Output("r", TokenDelta((1,), (), FinishReason.LENGTH))])
        await stream.accepted()
        assert not stream.is_finished
        stream.close()

    run(test)


actions = st.lists(
    st.tuples(
        st.sampled_from(["read", "close", "cancel", "close at once", "lose"]), st.integers(0, 5), st.integers(1, 40)
    ),
    min_size=1,
    max_size=25,
)


async def act(both: Pair, what: str, after: int, max_tokens: int) -> None:
    stream, call = await both.start(max_tokens=max_tokens)
    try:
        if what == "close at once":
            return
        for _ in range(after):
            if (await stream.receive()).finish_reason:
                return
        if what == "read":
            await read(stream)
        elif what == "cancel":
            call.cancel()
        elif what == "lose":
            (await both.links.to(both.listener.endpoint))._writer.transport.abort()
    except ReplicaLost:
        pass  # somebody else lost the connection
    finally:
        stream.close()


@settings(max_examples=40, deadline=None)
@given(actions)
def test_whatever_is_cancelled_whenever_nothing_is_left(plan):
    async def test(both: Pair) -> None:
        await asyncio.gather(*(act(both, *action) for action in plan))
        await both.is_idle()
        assert both.engine.stats().waiting == 0
        assert not any(task.result()._request_ids for task in both.links._links.values())

    async def main() -> None:
        before = asyncio.all_tasks()
        async with pair(last_frame_timeout_s=0.1) as both:
            await asyncio.wait_for(test(both), 30)
        assert asyncio.all_tasks() == before

    asyncio.run(main())
