"""The engine's face: what it refuses, how requests end, and that what goes wrong for one is nobody else's business."""

import asyncio
import gc
import shutil
import threading
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from queue import Queue
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.interface.errors import (
    AdapterChanged,
    AdapterRefused,
    AdapterUnavailable,
    EngineError,
    EngineStopped,
    ModelRefused,
    QueueFull,
    RequestRefused,
)
from engines.interface.protocol import Adapter, GenerateRequest, Output
from engines.tensors.kv_cache import KVCache
from engines.torch_engine import TorchEngine
from tests.support.engines.engine_harness import (
    BREAKS,
    RAISES,
    Collector,
    DrivenEngine,
    Engines,
    adapter,
    clear_prompt,
    engine_config,
    explosive_folder,
    kv_bytes,
    model_folder,
    prompt_of,
    reference_greedy,
    request,
    scaled_adapter,
    spoilt_adapter,
)
from tests.support.engines.tiny_models import VOCAB
from tests.support.waiting import eventually

BOTH = pytest.mark.parametrize("attention", ["auto", "sdpa"])


def good_request(max_tokens: int = 8, length: int = 20, bound: Adapter | None = None) -> GenerateRequest:
    prompt = clear_prompt("llama", length, max_tokens, bounds=(bound,))
    return request(prompt, adapter=bound, max_tokens=max_tokens)


def expected(made: GenerateRequest) -> list[int]:
    return list(reference_greedy("llama", made.adapter, made.prompt_token_ids, made.sampling.max_tokens)[0])


def assert_unused(engine: DrivenEngine) -> None:
    engine.run(engine.is_idle())
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.adapter_slots_pinned) == (0, 0, 0)
    assert stats.blocks_free == stats.blocks_total
    assert stats.stalled_s == 0


REFUSALS = {
    "an empty prompt": (request(()), "prompt", "The prompt is empty."),
    "an id beyond the vocabulary": (
        request((1, VOCAB, 2)),
        "prompt",
        f"Token id {VOCAB} is not in the vocabulary (0 to {VOCAB - 1}).",
    ),
    "a negative id": (request((-1,)), "prompt", f"Token id -1 is not in the vocabulary (0 to {VOCAB - 1})."),
    "a bias beyond the vocabulary": (
        request((1,), logit_bias=((3, 1.0), (VOCAB, 1.0))),
        "logit_bias",
        f"Token id {VOCAB} in logit_bias is not in the vocabulary (0 to {VOCAB - 1}).",
    ),
    "too many tokens": (
        request((1,) * 500, max_tokens=13),
        "max_tokens",
        "Prompt length plus max_tokens exceeds the model's context window: 500 + 13 > 512",
    ),
}


@pytest.mark.parametrize(("made", "field", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_run_is_refused_at_once(made: GenerateRequest, field: str, message: str, engines: Engines) -> None:
    engine = engines("llama")
    with pytest.raises(RequestRefused) as refusal:
        engine.one(made)
    assert (refusal.value.field, str(refusal.value)) == (field, message)
    assert_unused(engine)


def test_a_request_may_fill_the_context_to_the_last_token(engines: Engines) -> None:
    result = engines("llama").one(request((1,) * 500, max_tokens=12))
    assert len(result.token_ids) == 12


def test_a_request_id_is_free_again_once_its_request_has_ended(engines: Engines) -> None:
    engine, made = engines("llama"), good_request()
    for _ in range(2):
        assert engine.one(made).token_ids == expected(made)

    async def twice() -> None:
        sink = Collector()
        sink.expect(made.request_id)
        engine.engine.submit(made, sink)
        with pytest.raises(RequestRefused, match="is in use"):
            engine.engine.submit(made, sink)
        engine.engine.abort(made.request_id)
        engine.engine.submit(made, sink)
        await sink.until(lambda: sink.results[made.request_id].ended)
        assert sink.results[made.request_id].token_ids == expected(made)

    engine.run(twice())


def test_a_full_queue_is_said_at_once_and_passes(engines: Engines) -> None:
    engine = engines("llama", max_running=1, max_waiting=2)

    async def check() -> None:
        sink = Collector()
        accepted = [request(prompt_of(5), max_tokens=200) for _ in range(3)]
        for made in accepted:
            sink.expect(made.request_id)
            engine.engine.submit(made, sink)
        with pytest.raises(QueueFull) as refusal:
            engine.engine.submit(request((1,)), sink)
        assert refusal.value.limit == 2
        engine.engine.abort(accepted[1].request_id)
        last = good_request()
        sink.expect(last.request_id)
        engine.engine.submit(last, sink)
        engine.engine.abort(accepted[0].request_id)
        engine.engine.abort(accepted[2].request_id)
        await sink.until(lambda: sink.results[last.request_id].ended)
        assert sink.results[last.request_id].token_ids == expected(last)

    engine.run(check())
    assert_unused(engine)


def test_in_a_full_queue_another_tenant_gets_its_share_of_the_places(engines: Engines) -> None:
    engine = engines("llama", max_running=1, max_waiting=3)

    async def check() -> None:
        sink = Collector()
        crowd = [request(prompt_of(5), max_tokens=200, tenant="crowd") for _ in range(4)]
        other = request(prompt_of(5), max_tokens=3, tenant="other")
        for made in crowd:
            sink.expect(made.request_id)
            engine.engine.submit(made, sink)
        sink.expect(other.request_id)
        engine.engine.submit(other, sink)
        displaced = sink.results[crowd[3].request_id]
        assert isinstance(displaced.error, QueueFull)
        with pytest.raises(QueueFull):
            engine.engine.submit(request((1,), tenant="crowd"), sink)
        await sink.until(lambda: sink.results[other.request_id].ended)
        for made in crowd[:3]:
            engine.engine.abort(made.request_id)
        await engine.is_idle()

    before = engine.stats().counters
    engine.run(check())
    after = engine.stats().counters
    assert after.failed_requests - before.failed_requests == 1
    assert after.finished + after.aborted + after.failed_requests == after.requests
    assert_unused(engine)


def test_a_request_whose_forward_raises_fails_alone() -> None:
    config = engine_config(source=str(explosive_folder()), trust_remote_code=True, self_test=False)
    with DrivenEngine(config) as engine:
        good = [good_request(length=length) for length in (5, 20, 40)]
        bad = [request((3, RAISES, 4)), request((RAISES,))]
        results = engine.generate(good[0], bad[0], good[1], bad[1], good[2], arrivals=[0, 2, 2, 6, 6])
        for made, result in zip(good, [results[0], results[2], results[4]], strict=True):
            assert result.token_ids == expected(made)
        for result in (results[1], results[3]):
            assert isinstance(result.error, EngineError)
            assert result.token_ids == []
        for _ in range(5):
            assert engine.one(request((RAISES,))).error is not None
        assert engine.one(good[0]).token_ids == expected(good[0])
        assert not engine.stats().failed
        assert_unused(engine)


def test_a_device_that_is_broken_ends_every_request_and_shows() -> None:
    config = engine_config(source=str(explosive_folder()), trust_remote_code=True, self_test=False)
    engine = DrivenEngine(config)
    requests = [request(prompt_of(5), max_tokens=400) for _ in range(4)]
    results = engine.run(_until_broken(engine, requests))
    assert all(isinstance(error, EngineError) for error in results)
    assert any(isinstance(error, EngineStopped) for error in results)
    assert engine.stats().failed
    with pytest.raises(EngineStopped):
        engine.one(good_request())
    engine.close()


async def _until_broken(engine: DrivenEngine, requests: Sequence[GenerateRequest]) -> list[EngineError | None]:
    sink = Collector()
    for made in (*requests, request((BREAKS,))):
        sink.expect(made.request_id)
        engine.engine.submit(made, sink)
    await sink.until(lambda: all(result.ended for result in sink.results.values()))
    return [result.error for result in sink.results.values()]


@BOTH
def test_an_adapter_that_overflows_fails_its_own_requests_and_leaves_nothing_behind(
    attention: str, engines: Engines
) -> None:
    wild = scaled_adapter(adapter("llama", "all"), f"wild-{attention}", 1e30)
    engine = engines("llama", attention=attention, context_length=96, kv_cache_bytes=kv_bytes("llama", 8))
    good = [good_request(length=length, bound=bound) for bound in (None, adapter("llama", "all")) for length in (5, 20)]
    for _ in range(3):  # the pool is so small that the blocks it used are used again at once
        bad = [request(prompt_of(length), adapter=wild) for length in (3, 30, 60)]
        mixed = [good[0], bad[0], good[1], bad[1], good[2], bad[2], good[3]]
        results = dict(zip((made.request_id for made in mixed), engine.generate(*mixed), strict=True))
        for made in good:
            assert results[made.request_id].token_ids == expected(made)
        for made in bad:
            error = results[made.request_id].error
            assert isinstance(error, AdapterRefused)
            assert str(error) == "With this adapter the model computes NaN or infinity: its values are too large."
    assert_unused(engine)


@BOTH
@pytest.mark.parametrize("length", [40, 200])
def test_a_request_that_is_not_finite_leaves_no_spoilt_prefix_to_others(attention: str, length: int) -> None:
    bound = spoilt_adapter(adapter("llama", "embedding"), f"spoilt-{attention}-{length}", token_id=7)
    prompts = (clear_prompt("llama", length, 8, bounds=(bound,), seed=10_000 * i) for i in count())
    good = next(prompt for prompt in prompts if 7 not in prompt)
    # The same words, and then the token, in one chunk, in the next one, and among others who decode.
    bad = [(*good[:cut], 7, *good[cut:]) for cut in (length, 33)]
    config = engine_config(attention=attention, max_step_tokens=64)
    with DrivenEngine(config) as engine:
        for prompt in bad:
            assert isinstance(engine.one(request(prompt, adapter=bound)).error, AdapterRefused)
        expected_ids = reference_greedy("llama", bound, good, 8)[0]
        assert tuple(engine.one(request(good, adapter=bound)).token_ids) == expected_ids
        results = engine.generate(
            request(good, adapter=bound), *(request(prompt, adapter=bound) for prompt in bad), arrivals=[0, 1, 3]
        )
        assert tuple(results[0].token_ids) == expected_ids
        assert tuple(engine.one(request(good, adapter=bound)).token_ids) == expected_ids
        assert_unused(engine)


def test_the_loop_keeps_its_threads_when_an_adapter_is_loaded_before_anything_runs() -> None:
    with DrivenEngine(engine_config(attention="sdpa", threads=2)) as engine:
        engine.one(request((1, 2), adapter=adapter("llama", "q-v")))
        found: Queue[int] = Queue()
        parts = engine.engine._parts
        assert parts is not None
        parts.loop.post(lambda loop: found.put(torch.get_num_threads()))
        assert found.get(timeout=30) == 2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("context_length", [3, 20])
def test_a_model_starts_with_any_context_length(name: str, context_length: int) -> None:
    with DrivenEngine(engine_config(name, context_length=context_length)) as engine:
        prompt = clear_prompt(name, context_length - 1, 1)
        assert tuple(engine.one(request(prompt, max_tokens=1)).token_ids) == reference_greedy(name, None, prompt, 1)[0]


def test_adapters_that_cannot_be_served_are_refused_and_the_others_go_on(engines: Engines, tmp_path: Path) -> None:
    engine = engines("llama", max_adapter_rank=8)
    infinite = scaled_adapter(adapter("llama", "q-v"), f"infinite-{tmp_path.name}", float("inf"))
    good = good_request(bound=adapter("llama", "q-v"))
    too_wide = request(prompt_of(5), adapter=adapter("llama", "wide"))
    results = engine.generate(
        request(prompt_of(5), adapter=infinite), good, too_wide, too_wide_again := _again(too_wide)
    )
    assert too_wide_again.adapter == too_wide.adapter
    assert results[1].token_ids == expected(good)
    for result, words in (
        (results[0], "holds NaN or infinity"),
        (results[2], "limit is 8"),
        (results[3], "limit is 8"),
    ):
        assert isinstance(result.error, AdapterRefused)
        assert words in str(result.error)
    assert_unused(engine)


def _again(made: GenerateRequest) -> GenerateRequest:
    return request(made.prompt_token_ids, adapter=made.adapter)


def test_a_directory_that_holds_something_else_by_now_is_said_to_have_changed(engines: Engines, tmp_path: Path) -> None:
    engine = engines("llama")
    bound = adapter("llama", "all", seed=7)
    moved = Adapter(bound.digest, str(tmp_path / "it"))
    shutil.copytree(adapter("llama", "q-v", seed=7).directory, moved.directory)
    gone = Adapter(bound.digest, str(tmp_path / "nowhere"))
    results = engine.generate(*(request(prompt_of(5), adapter=one) for one in (moved, gone)))
    assert all(isinstance(result.error, AdapterChanged) for result in results)
    whole = request(prompt_of(5), adapter=bound)
    assert engine.one(whole).error is None
    assert engine.one(_again(request(prompt_of(5), adapter=moved))).error is None, "the content is known by now"


def test_an_adapter_that_takes_too_long_is_unavailable_for_now(engines: Engines) -> None:
    # One loader: while it has one, the others have waited too long at the next look.
    engine = engines("llama", adapter_load_timeout_s=1e-9, adapter_loaders=1)
    errors = [
        result.error
        for result in engine.generate(*(request((1, 2), adapter=adapter("llama", "q-v", seed)) for seed in range(12)))
    ]
    unavailable = [error for error in errors if error is not None]
    assert unavailable
    assert {type(error) for error in unavailable} == {AdapterUnavailable}
    assert str(unavailable[0]) == "The checkpoint was not loaded within 1e-09 s; try again."
    assert_unused(engine)


def test_two_hundred_clients_that_leave_when_they_like_leave_nothing_behind(engines: Engines) -> None:
    # Few blocks, few slots, room for one adapter: everything has to wait for everything.
    engine = engines(
        "llama",
        context_length=96,
        kv_cache_bytes=kv_bytes("llama", 12),
        max_running=6,
        max_adapters=2,
        adapter_bytes=1,
        max_step_tokens=40,
        max_step_tokens_decoding=20,
    )

    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        requests, arrivals, aborts = clients(Random(seed))
        results = engine.generate(*requests, arrivals=arrivals, aborts=aborts)
        for made, result in zip(requests, results, strict=True):
            assert result.error is None
            assert result.aborted or len(result.token_ids) == made.sampling.max_tokens
        assert_unused(engine)

    check()


def clients(rng: Random) -> tuple[list[GenerateRequest], list[int], dict[int, int]]:
    """200 requests, after how many tokens of all each arrives, and after how many of its own some are aborted."""
    bounds = [None, None, *(adapter("llama", kind) for kind in ("q-v", "head", "embedding"))]
    requests = [
        request(
            prompt_of(rng.randint(1, 60), seed=rng.randint(0, 3)),
            adapter=rng.choice(bounds),
            tenant=rng.choice("ab"),
            max_tokens=rng.randint(1, 8),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        for _ in range(200)
    ]
    arrivals = [rng.randint(0, 400) for _ in requests]
    aborts = {index: rng.choice([0, 0, 1, 3]) for index in range(200) if rng.random() < 0.6}
    return requests, arrivals, aborts


def test_closing_a_busy_engine_ends_every_request_joins_its_thread_and_frees_its_memory() -> None:
    caches, before = num_caches(), threading.enumerate()
    engine = DrivenEngine(engine_config("llama", attention="sdpa", max_running=2))

    async def check() -> None:
        sink = Collector()
        requests = [
            request(prompt_of(20), max_tokens=400, adapter=bound)
            for bound in (None, adapter("llama", "q-v"), None, adapter("llama", "head"))
        ]
        for made in requests:
            sink.expect(made.request_id)
            engine.engine.submit(made, sink)
        await sink.until(lambda: sink.num_tokens > 5)
        await asyncio.gather(engine.engine.close(), engine.engine.close())
        assert [type(sink.results[made.request_id].error) for made in requests] == [EngineStopped] * 4
        with pytest.raises(EngineStopped):
            engine.engine.submit(requests[0], sink)
        engine.engine.abort(requests[0].request_id)
        assert not sink.after_end

    engine.run(check())
    assert engine.stats().failed
    eventually(lambda: num_caches() <= caches)  # a load that is under way is not waited for, and holds on to the model
    engine.close()
    eventually(lambda: {one.name for one in threading.enumerate() if one not in before} <= {"tqdm_monitor"})


def num_caches() -> int:
    gc.collect()
    return sum(isinstance(thing, KVCache) for thing in gc.get_objects())


def test_an_engine_that_was_not_started_takes_nothing() -> None:
    engine = TorchEngine(engine_config("llama"))
    with pytest.raises(EngineStopped):
        engine.submit(request((1,)), Collector())
    with pytest.raises(EngineStopped):
        _ = engine.facts
    engine.abort("nothing")
    asyncio.run(engine.close())


def test_an_engine_that_is_closed_while_it_starts_does_not_start() -> None:
    engine = TorchEngine(engine_config("llama"))

    async def check() -> list[object]:
        return list(await asyncio.gather(engine.start(), engine.close(), return_exceptions=True))

    started, closed = asyncio.run(check())
    assert isinstance(started, EngineStopped)
    assert closed is None


class BrokenSink:
    def deliver(self, outputs: Sequence[Output]) -> None:
        raise ValueError("this connection is gone")


def test_a_sink_that_raises_takes_nothing_from_the_others(engines: Engines) -> None:
    engine = engines("llama")
    made = good_request()

    async def check() -> None:
        sink = Collector()
        for _ in range(3):
            engine.engine.submit(request(prompt_of(5), max_tokens=400), BrokenSink())
        sink.expect(made.request_id)
        engine.engine.submit(made, sink)
        await sink.until(lambda: sink.results[made.request_id].ended)
        assert sink.results[made.request_id].token_ids == expected(made)

    engine.run(check())
    assert_unused(engine)


def test_the_stats_and_counters_say_what_happened(engines: Engines) -> None:
    engine = engines("llama", max_adapters=2, max_running=5)
    bounds = [adapter("llama", kind) for kind in ("q-v", "head", "embedding")]
    for bound in bounds:
        engine.one(request(prompt_of(20), adapter=bound, max_tokens=3))
    long = prompt_of(50, seed=9)
    for _ in range(2):
        engine.one(request(long, max_tokens=5))
    stats = engine.stats()
    assert stats.adapters == (bounds[1].digest, bounds[2].digest)
    assert stats.adapter_slots_total == 2
    assert stats.blocks_cached == 3 * 1 + 3
    assert stats.counters.cached_tokens == 48
    assert stats.counters.prefill_tokens == 3 * 20 + 50 + 2 + _probes(stats.counters.requests, 5)
    assert stats.counters.decode_tokens == 3 * 2 + 2 * 4
    assert stats.counters.adapter_loads == 3
    assert stats.counters.adapter_evictions == 1
    assert stats.counters.finished == stats.counters.requests
    assert stats.counters.failed_requests == stats.counters.preemptions == 0
    assert stats.stalled_s == 0


def test_the_first_token_tells_how_long_it_was_queued_and_computed(engines: Engines) -> None:
    engine = engines("llama", max_running=1)
    began_at = time.monotonic()
    first, second = engine.generate(*(request(prompt_of(30), max_tokens=30) for _ in range(2)))
    took_s = time.monotonic() - began_at
    ((at_once,), (waited,)) = first.timings, second.timings
    assert 0 < at_once.queued_s + at_once.prefill_s <= waited.queued_s < waited.queued_s + waited.prefill_s <= took_s
    assert min(at_once.queued_s, at_once.prefill_s, waited.prefill_s) > 0


def test_adapters_are_told_by_where_they_are(engines: Engines) -> None:
    engine = engines("llama", max_adapters=2, adapter_loaders=1)
    seen = []

    async def check() -> None:
        sink = Collector()
        made = [request((1, 2), adapter=adapter("llama", "q-v", seed), max_tokens=1) for seed in range(30, 42)]
        for one in made:
            sink.expect(one.request_id)
            engine.engine.submit(one, sink)
        while not all(sink.results[one.request_id].ended for one in made):
            seen.append(engine.engine.stats().adapters_loading)
            await asyncio.sleep(0)

    before = engine.stats()
    engine.run(check())
    after = engine.stats()
    assert 0 < max(seen) <= 12
    assert after.adapters_in_memory == before.adapters_in_memory + 12
    assert after.adapter_bytes > before.adapter_bytes
    assert (len(after.adapters), after.adapters_loading) == (2, 0)


def _probes(requests: float, own: int) -> float:
    """The harness sends a request of one token after each of a test's own, to know that all is done."""
    return requests - own


def test_the_context_and_the_cache_are_what_was_asked_for() -> None:
    config = engine_config("llama", context_length=100, kv_cache_bytes=kv_bytes("llama", 21), max_running=3)
    with DrivenEngine(config) as engine:
        facts = engine.engine.facts
        assert (facts.vocab_size, facts.context_length, facts.kv_capacity_tokens) == (VOCAB, 100, 20 * 16)
        assert engine.one(request(prompt_of(90), max_tokens=10)).error is None
        with pytest.raises(RequestRefused, match="90 \\+ 11 > 100"):
            engine.one(request(prompt_of(90), max_tokens=11))
    with DrivenEngine(engine_config("llama", kv_cache_bytes=None, max_running=2)) as engine:
        assert engine.engine.facts.context_length == 512
        assert engine.engine.facts.kv_capacity_tokens == 2 * 512


def test_a_cache_that_cannot_hold_one_sequence_is_refused_with_the_bytes_it_takes() -> None:
    needed = kv_bytes("llama", 33)
    message = f"kv_cache_bytes = {needed - 1} holds 496 tokens, fewer than context_length = 512"
    with pytest.raises(ModelRefused, match=message) as refusal:
        DrivenEngine(engine_config("llama", kv_cache_bytes=needed - 1))
    assert f"Give at least {needed} bytes" in str(refusal.value)
    DrivenEngine(engine_config("llama", kv_cache_bytes=needed)).close()


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ModelRefused, match="context_length = 513 is more than the 512 tokens"):
        DrivenEngine(engine_config("llama", context_length=513))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        DrivenEngine(engine_config(source=str(tmp_path)))
    shutil.copy(model_folder("llama") / "config.json", tmp_path)
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        DrivenEngine(engine_config(source=str(tmp_path)))
