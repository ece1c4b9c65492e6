"""In exact mode the bits of every result are the request's own: alone or in company, in whatever chunks, with whatever
arrivals and aborts around it, from the prefix cache, after a preemption.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engines.interface.protocol import Adapter, GenerateRequest
from tests.support.engines.engine_harness import (
    DrivenEngine,
    Engines,
    Result,
    adapter,
    cramped,
    engine_config,
    prompt_of,
    request,
)
from tests.support.engines.tiny_models import CONFIGS

ADAPTERS: Mapping[str, tuple[str, ...]] = {
    "llama": ("all", "head", "embedding"),
    "qwen3-moe": ("experts", "router"),
    "gpt-oss": ("oss-experts",),
    "deepseek-v3": ("mla", "experts"),
}
MODELS = [
    pytest.param("llama", "auto"),
    pytest.param("llama", "sdpa"),
    pytest.param("qwen3-moe", "auto"),
    pytest.param("gemma2", "auto"),
    *(
        pytest.param(name, attention, marks=pytest.mark.slow)
        for name, attention in (
            ("mistral", "auto"),
            ("mistral", "sdpa"),
            ("gemma3", "auto"),
            ("gpt-oss", "auto"),
            ("deepseek-v3", "auto"),
        )
    ),
]


def calm(engines: Engines, name: str, attention: str) -> DrivenEngine:
    return engines(name, attention=attention, exact=True, prefix_cache=False)


def hard(engines: Engines, name: str, attention: str) -> DrivenEngine:
    """`cramped`, and fewer adapter slots than adapters."""
    return engines(name, attention=attention, exact=True, **cramped(name), max_adapters=2)


def all_requests(name: str) -> list[GenerateRequest]:
    """Every kind of sampling and every adapter over prompts of many lengths, some of which share a prefix."""
    bounds: list[Adapter | None] = [None, *(adapter(name, kind) for kind in ADAPTERS.get(name, ()))]
    drawn = {"temperature": 0.9, "logprobs": 2, "max_tokens": 8}
    growing = [{**drawn, "seed": seed, "max_tokens": 40} for seed in range(3)]
    kinds = [
        {"max_tokens": 8, "prompt_logprobs": 2},
        {"logprobs": 3, "max_tokens": 8},
        {**drawn, "seed": 5},
        {**drawn, "seed": 6, "top_p": 0.8, "presence_penalty": 0.7, "logit_bias": ((9, 1.5),)},
        {**drawn, "seed": -7, "top_k": 12, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.4},
    ]
    prompts = [*(prompt_of(length) for length in (15, 14, 13, 12, 64, 33, 1)), prompt_of(64)[:50]]
    return [request(prompt_of(13 + index), **kind) for index, kind in enumerate(growing)] + [
        request(prompts[(index + 3 * number) % len(prompts)], adapter=bound, **kind)
        for number, bound in enumerate(bounds)
        for index, kind in enumerate(kinds)
    ]


class Alone:
    """Results of requests that nobody else was there to disturb, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[Result]] = {}

    def __call__(self, engines: Engines, name: str, attention: str) -> list[Result]:
        key = (name, attention)
        if key not in self._known:
            engine = calm(engines, name, attention)
            self._known[key] = [engine.one(made) for made in all_requests(name)]
        return self._known[key]


alone = Alone()


def assert_same(found: Result, expected: Result) -> None:
    assert found.error is None
    if found.aborted:
        count = len(found.token_ids)
        expected = replace(
            expected, token_ids=expected.token_ids[:count], logprobs=expected.logprobs[:count], finish_reason=None
        )
        found = replace(found, aborted=False)
        if not count:
            found = replace(found, prompt_logprobs=expected.prompt_logprobs)
    assert replace(found, cached_tokens=0) == replace(expected, cached_tokens=0)


@pytest.mark.parametrize(("name", "attention"), MODELS)
def test_all_at_once_give_the_bits_of_each_alone(name: str, attention: str, engines: Engines) -> None:
    expected = alone(engines, name, attention)
    engine = hard(engines, name, attention)
    for index, (_, found) in enumerate(engine.until_preempted(lambda: all_requests(name)[:3])):
        assert_same(found, expected[index % 3])
    for found, wanted in zip(engine.generate(*all_requests(name)), expected, strict=True):
        assert_same(found, wanted)
    for _ in range(2):
        again = engine.one(all_requests(name)[7])
        assert_same(again, expected[7])
    assert again.cached_tokens == 48


@st.composite
def companies(draw: st.DrawFn, count: int) -> tuple[list[int], list[int], dict[int, int]]:
    """Indices of requests, when each arrives, and after how many tokens some are aborted."""
    chosen = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=12))
    arrivals = draw(st.lists(st.integers(0, 60), min_size=len(chosen), max_size=len(chosen)))
    aborts = draw(st.dictionaries(st.integers(0, len(chosen) - 1), st.integers(0, 9), max_size=4))
    return chosen, arrivals, aborts


@pytest.mark.parametrize(("name", "attention"), [("llama", "auto"), ("llama", "sdpa")])
def test_any_company_leaves_the_bits_as_they_are(name: str, attention: str, engines: Engines) -> None:
    expected = alone(engines, name, attention)
    engine = hard(engines, name, attention)

    @settings(max_examples=8, deadline=None)
    @given(companies(len(expected)))
    def check(company: tuple[Sequence[int], Sequence[int], Mapping[int, int]]) -> None:
        chosen, arrivals, aborts = company
        requests = all_requests(name)
        made = [replace(requests[i], request_id=f"{requests[i].request_id}-{n}") for n, i in enumerate(chosen)]
        for found, index in zip(engine.generate(*made, arrivals=arrivals, aborts=aborts), chosen, strict=True):
            assert_same(found, expected[index])

    check()


@pytest.mark.parametrize(("name", "attention"), [("llama", "auto"), ("llama", "sdpa"), ("gemma2", "auto")])
def test_chunks_of_one_token_leave_the_bits_as_they_are(name: str, attention: str, engines: Engines) -> None:
    engine = engines(name, attention=attention, exact=True, max_step_tokens=1, max_step_tokens_decoding=1)
    requests = all_requests(name)[3:11]
    for found, wanted in zip(engine.generate(*requests), alone(engines, name, attention)[3:11], strict=True):
        assert_same(found, wanted)


def test_layers_that_do_not_fill_the_processors_vectors_keep_their_bits_too(tmp_path: Path) -> None:
    """Torch computes the last elements of a tensor by other code than the rest."""
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    config.intermediate_size = 89
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    requests = [request(prompt_of(length), max_tokens=6, prompt_logprobs=0, logprobs=3) for length in (21, 22, 33, 7)]
    with DrivenEngine(engine_config(source=str(tmp_path), exact=True, max_step_tokens=50)) as engine:
        for found, expected in zip(engine.generate(*requests), map(engine.one, requests), strict=True):
            assert_same(found, expected)
