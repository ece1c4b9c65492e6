"""The engine without a model keeps the promises of the protocol."""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from engines.fake import FakeConfig, FakeEngine, Script
from engines.interface.errors import EngineError, EngineStopped, NonFiniteLogits, QueueFull, RequestRefused
from engines.interface.protocol import Adapter, FinishReason, GenerateRequest, Output, SamplingParams, TokenDelta


class Collector:
    """Collects what comes for its requests, and tells when all have ended."""

    def __init__(self, count: int = 1) -> None:
        self.events: dict[str, list[TokenDelta | EngineError]] = {}
        self.calls = 0
        self.ended = asyncio.Event()
        self._left = count

    def deliver(self, outputs: Sequence[Output]) -> None:
        self.calls += 1
        for output in outputs:
            self.events.setdefault(output.request_id, []).append(output.event)
            if isinstance(output.event, EngineError) or output.event.finish_reason is not None:
                self._left -= 1
        if not self._left:
            self.ended.set()

    def tokens(self, request_id: str = "r") -> list[int]:
        deltas = self.events[request_id]
        return [token for delta in deltas if isinstance(delta, TokenDelta) for token in delta.token_ids]

    def finish(self, request_id: str = "r") -> Any:
        last = self.events[request_id][-1]
        return last if isinstance(last, EngineError) else last.finish_reason


def request(
    request_id: str = "r", prompt: Sequence[int] = (1, 2, 3), adapter: str = "", **sampling: Any
) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 5, "seed": 0, **sampling})
    held = Adapter(adapter, "/nowhere") if adapter else None
    return GenerateRequest(request_id, tuple(prompt), params, held)


def generate(*requests: GenerateRequest, config: FakeConfig | None = None, script: Script | None = None) -> Collector:
    async def run() -> Collector:
        engine = FakeEngine(config or FakeConfig(), script)
        await engine.start()
        collector = Collector(len(requests))
        for one in requests:
            engine.submit(one, collector)
        async with asyncio.timeout(10):
            await collector.ended.wait()
        await engine.close()
        return collector

    return asyncio.run(run())


def test_tokens_depend_on_prompt_adapter_and_seed_alone() -> None:
    alone = generate(request(max_tokens=40)).tokens()
    others = [request(f"o{i}", prompt=(i + 1, 2)) for i in range(20)]
    assert generate(*others, request(max_tokens=40)).tokens() == alone
    assert generate(request(max_tokens=40), config=FakeConfig(tokens_per_step=7)).tokens() == alone
    assert generate(request(max_tokens=40, prompt=(1, 2, 4))).tokens() != alone
    assert generate(request(max_tokens=40, seed=1)).tokens() != alone
    assert generate(request(max_tokens=40, adapter="d")).tokens() != alone


def test_at_temperature_zero_the_seed_does_not_matter() -> None:
    assert generate(request(temperature=0.0, seed=1)).tokens() == generate(request(temperature=0.0, seed=2)).tokens()


def test_a_reply_ends_at_max_tokens_or_with_a_stop_id() -> None:
    longest = generate(request())
    assert (len(longest.tokens()), longest.finish()) == (5, FinishReason.LENGTH)
    stopped = generate(request(stop_token_ids=frozenset({9})), script=lambda _: [7, 9, 8])
    assert (stopped.tokens(), stopped.finish()) == ([7, 9], FinishReason.STOP)


def test_made_up_replies_have_the_configured_length_on_average() -> None:
    config = FakeConfig(reply_tokens=10)
    requests = [request(str(i), prompt=(i + 1,), max_tokens=100, stop_token_ids=frozenset({9})) for i in range(200)]
    found = generate(*requests, config=config)
    lengths = [len(found.tokens(str(i))) for i in range(200)]
    assert {found.finish(str(i)) for i in range(200)} == {FinishReason.STOP}
    assert 1 <= min(lengths) <= max(lengths) <= 20
    assert 8 < sum(lengths) / len(lengths) < 13


def test_an_error_in_a_script_ends_the_request_and_no_other() -> None:
    failing = request("f", prompt=(5,))
    found = generate(failing, request(), script=lambda r: [1, NonFiniteLogits("x")] if r.request_id == "f" else None)
    assert found.tokens("f") == [1]
    assert isinstance(found.finish("f"), NonFiniteLogits)
    assert found.finish("r") is FinishReason.LENGTH


def test_one_call_per_step_delivers_for_all_requests() -> None:
    assert generate(*(request(str(i)) for i in range(20))).calls == 5


def test_logprobs_are_a_distribution_best_first() -> None:
    for temperature in (0.0, 0.5, 1.0, 1e-4):
        (delta, *_) = generate(request(logprobs=20, temperature=temperature)).events["r"]
        assert isinstance(delta, TokenDelta)
        values = [logprob for _, logprob in delta.logprobs[0].top]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-9
        known = dict(delta.logprobs[0].top)
        assert known.get(delta.token_ids[0], delta.logprobs[0].logprob) == delta.logprobs[0].logprob


def test_prompts_are_scored_on_the_first_delta_only() -> None:
    first, *rest = generate(request(prompt_logprobs=2)).events["r"]
    assert isinstance(first, TokenDelta)
    assert first.prompt_logprobs[0] is None
    assert [entry.token_id for entry in first.prompt_logprobs[1:] if entry] == [2, 3]
    assert all(isinstance(delta, TokenDelta) and not delta.prompt_logprobs for delta in rest)


def test_the_first_delta_tells_what_it_waited_for() -> None:
    began_at = time.monotonic()
    collector = generate(request("a", max_tokens=20), request("b"), config=FakeConfig(max_running=1))
    took_s = time.monotonic() - began_at
    for name in "ab":
        first, *others = collector.events[name]
        assert isinstance(first, TokenDelta)
        assert first.timing is not None
        assert 0 <= first.timing.queued_s <= first.timing.queued_s + first.timing.prefill_s <= took_s
        assert [delta.timing for delta in others if isinstance(delta, TokenDelta)] == [None] * len(others)
    waited, at_once = (collector.events[name][0].timing.queued_s for name in "ba")
    assert waited > at_once


def test_no_tokens_score_a_prompt() -> None:
    (delta,) = generate(request(max_tokens=0, prompt_logprobs=0)).events["r"]
    assert isinstance(delta, TokenDelta)
    assert (delta.token_ids, delta.finish_reason, len(delta.prompt_logprobs)) == ((), FinishReason.LENGTH, 3)


def test_the_prefix_cache_counts_whole_blocks_of_the_same_adapter() -> None:
    prompt = tuple(range(40))

    async def cached(adapter: str, engine: FakeEngine) -> int:
        collector = Collector()
        engine.submit(request(prompt=prompt, adapter=adapter, max_tokens=1), collector)
        await collector.ended.wait()
        (delta,) = collector.events["r"]
        assert isinstance(delta, TokenDelta)
        return delta.cached_tokens

    async def run() -> list[int]:
        engine = FakeEngine()
        await engine.start()
        found = [await cached(adapter, engine) for adapter in ("", "", "d", "d", "")]
        await engine.close()
        return found

    assert asyncio.run(run()) == [0, 32, 0, 32, 32]


@pytest.mark.parametrize(
    ("bad", "field", "message"),
    [
        (request(prompt=()), "prompt", "prompt must have at least one token."),
        (request(prompt=(32_000,)), "prompt", "prompt holds the token id 32000, vocabulary size 32000."),
        (request(max_tokens=40_000), "max_tokens", "prompt and max_tokens have 40003 tokens, the limit is 32768."),
    ],
)
def test_what_cannot_run_is_refused_at_once(bad: GenerateRequest, field: str, message: str) -> None:
    async def run() -> RequestRefused:
        engine = FakeEngine()
        await engine.start()
        with pytest.raises(RequestRefused) as caught:
            engine.submit(bad, Collector())
        assert engine.stats().waiting == 0
        await engine.close()
        return caught.value

    error = asyncio.run(run())
    assert (error.field, error.message) == (field, message)


def test_a_full_queue_refuses_and_a_closed_engine_ends_all() -> None:
    async def run() -> Collector:
        engine = FakeEngine(FakeConfig(max_running=1, max_waiting=2))
        await engine.start()
        engine.pause()
        collector = Collector(3)
        for index in range(2):
            engine.submit(request(str(index)), collector)
        await asyncio.sleep(0)
        assert engine.stats().waiting == 2
        engine.resume()
        await asyncio.sleep(0)
        engine.pause()
        engine.submit(request("2"), collector)
        with pytest.raises(QueueFull):
            engine.submit(request("3"), collector)
        await engine.close()
        with pytest.raises(EngineStopped):
            engine.submit(request("4"), collector)
        return collector

    found = asyncio.run(run())
    assert isinstance(found.finish("1"), EngineStopped)
    assert isinstance(found.finish("2"), EngineStopped)


def test_an_aborted_request_gets_nothing_more_and_holds_nothing() -> None:
    async def run() -> tuple[Collector, int, int]:
        engine = FakeEngine(FakeConfig(max_running=1))
        await engine.start()
        collector = Collector()
        engine.submit(request("a", max_tokens=30_000), collector)
        engine.submit(request("b", max_tokens=30_000), collector)
        engine.submit(request("c"), collector)
        await asyncio.sleep(0.01)
        for request_id in ("a", "b", "a", "unknown"):
            engine.abort(request_id)
        async with asyncio.timeout(10):
            await collector.ended.wait()
        stats = engine.stats()
        await engine.close()
        return collector, stats.running + stats.waiting, stats.blocks_total - stats.blocks_free

    found, left, blocks = asyncio.run(run())
    assert found.finish("c") is FinishReason.LENGTH
    assert (left, blocks) == (0, 0)


def test_more_adapters_than_slots_wait_for_each_other() -> None:
    requests = [request(str(i), adapter=f"d{i}") for i in range(6)]
    found = generate(*requests, config=FakeConfig(max_adapters=2))
    assert [found.finish(str(i)) for i in range(6)] == [FinishReason.LENGTH] * 6


def test_adapters_in_use_are_not_evicted() -> None:
    async def run() -> None:
        engine = FakeEngine(FakeConfig(max_adapters=2))
        await engine.start()
        collector = Collector()
        engine.submit(request("a", adapter="used", max_tokens=30_000), collector)
        await asyncio.sleep(0.01)
        for name in ("x", "y", "z"):
            one = Collector()
            engine.submit(request(name, adapter=name, max_tokens=1), one)
            async with asyncio.timeout(10):
                await one.ended.wait()
        assert set(engine.stats().adapters) == {"used", "z"}
        assert engine.stats().adapter_slots_pinned == 1
        await engine.close()

    asyncio.run(run())


def test_a_hanging_engine_shows_how_long_it_has_not_moved() -> None:
    async def run() -> tuple[float, float]:
        engine = FakeEngine()
        await engine.start()
        idle = engine.stats().stalled_s
        engine.pause()
        engine.submit(request(), Collector())
        await asyncio.sleep(0.05)
        stalled = engine.stats().stalled_s
        await engine.close()
        return idle, stalled

    idle, stalled = asyncio.run(run())
    assert idle == 0.0
    assert stalled >= 0.05


@pytest.mark.parametrize("settings", [{"vocab_size": 24}, {"max_running": 0}, {"tokens_per_step": 0}, {"step_s": -1.0}])
def test_a_configuration_that_cannot_be_names_its_value(settings: dict[str, Any]) -> None:
    (name, value) = next(iter(settings.items()))
    with pytest.raises(ValueError, match=name) as caught:
        FakeConfig(**settings)
    assert repr(value) in str(caught.value)


def test_an_id_in_use_is_refused_also_while_it_waits() -> None:
    async def run() -> None:
        engine = FakeEngine(FakeConfig(max_running=1))
        await engine.start()
        collector = Collector(3)
        engine.submit(request("a", max_tokens=3), collector)
        engine.submit(request("b", max_tokens=3), collector)
        with pytest.raises(RequestRefused, match="'b' is in use"):
            engine.submit(request("b", max_tokens=3), collector)
        await engine.close()

    asyncio.run(run())


def test_a_sink_that_fails_loses_its_requests_alone() -> None:
    class Broken:
        def deliver(self, outputs: Sequence[Output]) -> None:
            raise RuntimeError("the client is gone")

    async def run() -> None:
        engine = FakeEngine(FakeConfig())
        await engine.start()
        collector = Collector()
        engine.submit(request("bad", max_tokens=30_000), Broken())
        engine.submit(request("good", max_tokens=3), collector)
        async with asyncio.timeout(10):
            await collector.ended.wait()
        assert engine.stats().running == 0
        await engine.close()

    asyncio.run(run())
