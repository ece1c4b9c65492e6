"""Greedy tokens and log-probabilities are those of transformers and PEFT: alone, batched, in chunks, from the prefix
cache, after preemption, with other adapters beside them.
"""

import pytest

from engines.interface.protocol import Adapter, GenerateRequest
from tests.support.engines.engine_harness import (
    DrivenEngine,
    Engines,
    adapter,
    assert_greedy,
    cramped,
    prompt_of,
    request,
)
from tests.support.engines.tiny_models import CONFIGS, HYBRID

LENGTHS = (15, 16, 1, 17, 40, 70)
TOKENS = 10

BY_MODEL = {
    "llama": ("q-v", "all", "head", "embedding", "wide"),
    "llama-tied": ("head", "embedding"),
    "qwen2": ("all",),
    "qwen3": ("all", "q-v"),
    "qwen3-moe": ("all", "experts", "router"),
    "mistral": ("all",),
    "gemma2": ("all", "embedding"),
    "gemma3": ("q-v", "embedding"),
    "gpt-oss": ("oss-experts", "q-v"),
    "deepseek-v3": ("mla", "experts"),
    "qwen3-5": ("all",),
    "qwen3-next": ("all", "experts"),
    "lfm2": ("all",),
}


NATIVE = ("llama", "llama-tied", "qwen2", "qwen3", "mistral")
"""Those that the C kernels compute unless told otherwise."""

BACKENDS = [*((name, "auto") for name in CONFIGS), *((name, "sdpa") for name in NATIVE)]


def hard(engines: Engines, name: str, attention: str = "auto") -> DrivenEngine:
    """`cramped`, and fewer adapter slots than adapters."""
    return engines(name, attention=attention, **cramped(name), max_adapters=2)


def requests_for(*bounds: Adapter | None, lengths: tuple[int, ...] = LENGTHS) -> list[GenerateRequest]:
    """The same prompts with each adapter."""
    return [
        request(prompt_of(length), adapter=bound, max_tokens=TOKENS, logprobs=0)
        for bound in bounds
        for length in lengths
    ]


@pytest.mark.parametrize(("name", "attention"), BACKENDS)
def test_each_architecture_gives_the_tokens_of_its_plain_forward(name: str, attention: str, engines: Engines) -> None:
    engine = hard(engines, name, attention)
    growing = [request(prompt_of(length), max_tokens=45, logprobs=0) for length in (13, 14, 15)]
    for made, result in engine.until_preempted(lambda: [*growing, *requests_for(None)]):
        assert_greedy(name, made, result)
    for made in [*requests_for(None), requests_for(None)[-1]]:
        result = engine.one(made)
        assert_greedy(name, made, result)
    assert result.cached_tokens == (0 if name in HYBRID else 64)


@pytest.mark.parametrize(("name", "attention"), [pair for pair in BACKENDS if pair[0] in BY_MODEL])
def test_adapters_and_base_in_one_batch_give_the_tokens_of_peft(name: str, attention: str, engines: Engines) -> None:
    engine = hard(engines, name, attention)
    bounds = (None, *(adapter(name, kind) for kind in BY_MODEL[name]))
    requests = requests_for(*bounds, lengths=(5, 40))
    results = engine.generate(*requests)
    for made, result in zip(requests, results, strict=True):
        assert_greedy(name, made, result)
    assert len({tuple(result.token_ids) for result in results}) == len(requests), "a change of nothing proves nothing"


@pytest.mark.parametrize("kind", BY_MODEL["llama"])
def test_an_adapter_alone_gives_the_tokens_of_peft(kind: str, engines: Engines) -> None:
    made = requests_for(adapter("llama", kind), lengths=(40,))[0]
    assert_greedy("llama", made, hard(engines, "llama").one(made))


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 16, 33, 1000])
def test_the_size_of_the_chunks_changes_nothing(max_step_tokens: int, attention: str, engines: Engines) -> None:
    budgets = {"max_step_tokens": max_step_tokens, "max_step_tokens_decoding": max_step_tokens}
    requests = requests_for(None, adapter("mistral", "all"))
    for made, result in zip(
        requests, engines("mistral", attention=attention, **budgets).generate(*requests), strict=True
    ):
        assert_greedy("mistral", made, result)


def test_a_warm_prefix_cache_changes_nothing_and_is_the_adapters_own(engines: Engines) -> None:
    engine = engines("llama")
    for made in requests_for(None, adapter("llama", "all"), adapter("llama", "q-v"), lengths=(69,)):
        cached = []
        for _ in range(2):
            again = request(made.prompt_token_ids, adapter=made.adapter, max_tokens=TOKENS, logprobs=0)
            result = engine.one(again)
            assert_greedy("llama", again, result)
            cached.append(result.cached_tokens)
        assert cached == [0, 64]


def test_the_prefix_cache_can_be_left_out(engines: Engines) -> None:
    engine = engines("llama", prefix_cache=False)
    for _ in range(2):
        made = requests_for(None, lengths=(70,))[0]
        result = engine.one(made)
        assert_greedy("llama", made, result)
        assert result.cached_tokens == 0


def test_an_answer_that_is_continued_finds_its_own_tokens_in_the_cache(engines: Engines) -> None:
    engine = engines("llama")
    first = engine.one(request(prompt_of(30, seed=2), max_tokens=30))
    longer = (*prompt_of(30, seed=2), *first.token_ids, 5)
    made = request(longer, max_tokens=TOKENS, logprobs=0)
    result = engine.one(made)
    assert_greedy("llama", made, result)
    assert result.cached_tokens == 48  # 59 tokens were computed: the last of the first answer never was


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_requests_that_arrive_while_others_decode_change_nothing(name: str, engines: Engines) -> None:
    engine = engines(name, max_step_tokens_decoding=9)
    requests = requests_for(None, adapter(name, "all"))
    results = engine.generate(*requests, arrivals=[3 * i for i in range(len(requests))])
    for made, result in zip(requests, results, strict=True):
        assert_greedy(name, made, result)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_an_adapter_that_is_evicted_and_loaded_again_gives_the_same_tokens(attention: str, engines: Engines) -> None:
    small = adapter("llama", "q-v")
    engine = engines("llama", attention=attention, max_adapters=1, adapter_bytes=1)
    for bound in (small, adapter("llama", "wide"), small, adapter("llama", "all"), small):
        made = requests_for(bound, lengths=(17,))[0]
        assert_greedy("llama", made, engine.one(made))
    assert engine.stats().counters.adapter_loads == 5
