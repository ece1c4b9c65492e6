"""Log-probabilities and seeded draws of the whole engine, against the plain forward."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from engines.interface.protocol import FinishReason, GenerateRequest, TokenLogprob
from tests.support.engines.engine_harness import (
    DrivenEngine,
    Engines,
    Result,
    adapter,
    cramped,
    prompt_of,
    reference_logits,
    reference_model,
    request,
)

BOTH = pytest.mark.parametrize("attention", ["auto", "sdpa"])
TOLERANCE = 3e-4


def small(engines: Engines, attention: str, name: str = "llama") -> DrivenEngine:
    return engines(name, attention=attention, **cramped(name))


def rows_of(made: GenerateRequest, text: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocab] after each token of a text, at the request's temperature."""
    logits = reference_logits(reference_model("llama", made.adapter), text)
    return torch.log_softmax(logits / (made.sampling.temperature or 1.0), dim=-1)


def assert_score(score: TokenLogprob | None, row: torch.Tensor, token_id: int, count: int) -> None:
    assert score is not None
    assert score.token_id == token_id
    assert score.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
    best = row.topk(count)
    assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    assert len({token for token, _ in score.top}) == count
    for token, value in score.top:
        assert value == pytest.approx(float(row[token]), abs=TOLERANCE)


def assert_prompt_scores(made: GenerateRequest, result: Result) -> None:
    prompt, count = made.prompt_token_ids, made.sampling.prompt_logprobs
    assert count is not None
    assert len(result.prompt_logprobs) == len(prompt)
    assert result.prompt_logprobs[0] is None
    rows = rows_of(made, prompt)
    for position, score in enumerate(result.prompt_logprobs[1:], start=1):
        assert_score(score, rows[position - 1], prompt[position], count)


@BOTH
def test_prompts_are_scored_as_the_plain_forward_does_in_any_chunks_with_any_company(
    attention: str, engines: Engines
) -> None:
    engine = small(engines, attention)
    params: list[dict[str, Any]] = [
        {"prompt_logprobs": 0, "max_tokens": 0},
        {"prompt_logprobs": 20, "max_tokens": 12},
        {"prompt_logprobs": 3, "max_tokens": 0, "adapter": adapter("llama", "all")},
        {"prompt_logprobs": 2, "max_tokens": 5, "temperature": 0.7},
    ]
    lengths = (1, 2, 15, 16, 33, 70)

    def requests() -> list[GenerateRequest]:
        growing = [request(prompt_of(length), prompt_logprobs=1, max_tokens=45) for length in (15, 14, 13)]
        return growing + [request(prompt_of(length), **one) for length, one in product(lengths, params)]

    for made, result in engine.until_preempted(requests):
        assert result.error is None
        assert_prompt_scores(made, result)
        assert len(result.token_ids) == made.sampling.max_tokens
        assert result.finish_reason is FinishReason.LENGTH


@BOTH
def test_a_warm_prefix_cache_leaves_the_scores_of_a_prompt_whole(attention: str, engines: Engines) -> None:
    engine = engines("llama", attention=attention)
    engine.one(request(prompt_of(60), max_tokens=4))
    made = request(prompt_of(60), max_tokens=4, prompt_logprobs=1)
    result = engine.one(made)
    assert_prompt_scores(made, result)
    assert result.cached_tokens == 0
    after = engine.one(request(prompt_of(60), max_tokens=4))
    assert (after.cached_tokens, after.token_ids) == (48, result.token_ids)


def test_a_request_for_nothing_ends_without_a_token(engines: Engines) -> None:
    result = engines("llama").one(request(prompt_of(5), max_tokens=0))
    assert (result.token_ids, result.prompt_logprobs) == ([], ())
    assert result.finish_reason is FinishReason.LENGTH


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drawn_tokens_are_scored_as_the_plain_forward_does(
    temperature: float, attention: str, engines: Engines
) -> None:
    made = request(prompt_of(20), max_tokens=10, temperature=temperature, top_p=0.9, logprobs=20, seed=3)
    result = small(engines, attention).one(made)
    text = [*made.prompt_token_ids, *result.token_ids]
    rows = rows_of(made, text)
    for index, (token_id, score) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        assert_score(score, rows[len(made.prompt_token_ids) - 1 + index], token_id, 20)


COMBINATIONS: list[dict[str, Any]] = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, **others}
    for (temperature, top_k, top_p, min_p), others in zip(
        product((0.6, 1.2), (0, 30), (1.0, 0.9), (0.0, 0.02)),
        [
            {},
            {"presence_penalty": 1.0},
            {"frequency_penalty": -0.5},
            {"repetition_penalty": 1.3},
            {"logit_bias": ((7, 2.0), (9, -100.0))},
            {"logprobs": 5},
            {"presence_penalty": 0.3, "repetition_penalty": 0.9, "logprobs": 0},
            {"logit_bias": ((11, 4.0),), "frequency_penalty": 0.8},
        ]
        * 2,
        strict=True,
    )
]


@BOTH
def test_a_seeded_request_gives_the_same_tokens_alone_and_in_company(attention: str, engines: Engines) -> None:
    """Up to rounding, which here decides nothing; `test_engine_exact` has the bits."""

    def requests() -> list[GenerateRequest]:
        return [
            request(prompt_of(10 + i), max_tokens=8, seed=i, adapter=bound, **params)
            for bound in (None, adapter("llama", "q-v"))
            for i, params in enumerate(COMBINATIONS)
        ]

    calm = engines("llama", attention=attention)
    alone = [calm.one(made) for made in requests()]
    together = small(engines, attention).generate(*requests(), arrivals=[i // 2 for i in range(32)])
    for first, second in zip(alone, together, strict=True):
        assert first.error is second.error is None
        assert first.token_ids == second.token_ids
        assert [score.logprob for score in first.logprobs] == pytest.approx(
            [score.logprob for score in second.logprobs], abs=TOLERANCE
        )
    assert len({tuple(result.token_ids) for result in alone}) == len(alone)


def test_another_seed_gives_other_tokens_and_the_same_seed_the_same(engines: Engines) -> None:
    engine = engines("llama")
    results = [engine.one(request(prompt_of(9), max_tokens=8, temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert results[0].token_ids == results[2].token_ids != results[1].token_ids
