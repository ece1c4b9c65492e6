"""Draws: the distribution is transformers', the draw is the request's own, whatever else is in the batch."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engines.planning.sequence import NO_SINK, TokenSequence
from engines.sampling import sampler
from engines.sampling.order import Order, units
from engines.sampling.sampler import Draws, Sampled, prompt_logprobs, sample, uniform
from tests.support.engines.engine_harness import request

DRAWS = 2000


def generation(prompt: Sequence[int] = (1, 2), output: Sequence[int] = (), **sampling: Any) -> TokenSequence:
    made = TokenSequence.of(request(tuple(prompt), **{"max_tokens": 100, "temperature": 1.0, **sampling}), NO_SINK)
    for token_id in output:
        made.append(token_id)
    return made


def row(vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def draws(logits: torch.Tensor, count: int = DRAWS, **sampling: Any) -> torch.Tensor:
    """How often each token is drawn from this row [vocab] by requests that differ in their seeds only."""
    sequences = [generation(seed=seed, **sampling) for seed in range(count)]
    chosen = [draw.token_id for draw in sample(logits.expand(count, -1), sequences)]
    return torch.bincount(torch.tensor(chosen), minlength=logits.shape[0])


def warped(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """The probabilities that transformers would draw from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return torch.softmax(warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].double(), dim=-1)


def assert_drawn_from(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Nothing outside the support, and chi-square within six deviations (the draws are fixed, so this never flakes)."""
    assert not counts[expected == 0].any()
    total = int(counts.sum())
    often = expected * total >= 5
    deviation = ((counts - expected * total) ** 2 / (expected * total))[often].sum()
    degrees = max(1, int(often.sum()) - 1)
    assert deviation <= degrees + 6 * math.sqrt(2 * degrees)


COMBINATIONS = [
    (temperature, top_k, top_p, min_p)
    for temperature, top_k, top_p, min_p in itertools.product((0.5, 1.3), (0, 5), (1.0, 0.8), (0.0, 0.1))
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), COMBINATIONS)
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = row(60)
    counts = draws(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_drawn_from(counts, warped(logits, temperature, top_k, top_p, min_p))


@pytest.mark.parametrize(
    ("scale", "top_k", "top_p", "min_p"),
    [
        (0.5, 0, 0.97, 0.0),
        (0.5, 1500, 0.9, 0.0),
        (0.5, 1500, 1.0, 0.0),
        (0.5, 0, 1.0, 0.2),
        (0.5, 6000, 0.6, 0.0),
        (0.5, 2399, 0.95, 0.1),
        # The first candidates have a share of 0.8 of the whole, but what counts is their share of the top 1500.
        (1.0, 1500, 0.8, 0.0),
    ],
)
def test_truncation_that_keeps_more_than_the_first_candidates_is_exact_too(
    scale: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = row(2400, scale=scale)
    expected = warped(logits, 1.0, top_k, top_p, min_p)
    counts = draws(logits, 800, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert not counts[expected == 0].any()
    # Single tokens are too rare for a test of each: compare the draws by rank, in twenty bins of equal probability.
    order = expected.argsort(descending=True)
    bins = (expected[order].cumsum(0) * 20).long().clamp(max=19)
    found = torch.zeros(20).index_add(0, bins, counts[order].float())
    assert_drawn_from(found, torch.zeros(20, dtype=torch.float64).index_add(0, bins, expected[order]))


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 1, 3, 40, 2000, 10**9]),
        "top_p": st.sampled_from([1.0, 0.99, 0.7, 0.01]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "logit_bias": st.sampled_from([(), ((3, 2.5), (7, -100.0))]),
        "logprobs": st.sampled_from([None, 0, 5, 20]),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(PARAMS, st.lists(st.integers(0, 39), max_size=6)), min_size=1, max_size=6),
    vocab=st.sampled_from([40, 333, 3001]),
    threads=st.sampled_from([1, 2]),
)
def test_a_row_alone_and_in_company_gives_the_same_to_the_bit(
    requests: list[tuple[dict[str, Any], list[int]]], vocab: int, threads: int
) -> None:
    logits = torch.stack([row(vocab, seed) for seed in range(len(requests))])
    with computed_by(threads):
        together = sample(logits, [generation(output=output, **params) for params, output in requests])
        for i, (params, output) in enumerate(requests):
            assert sample(logits[i : i + 1], [generation(output=output, **params)]) == [together[i]]


def test_how_far_the_search_goes_for_one_row_changes_no_other() -> None:
    """All tokens are as likely, so that one more or less is kept where a sum is rounded in another way."""
    vocab, look = 40, partial(sample, candidates=4)
    for kept in range(1, vocab, 2):
        narrow = [generation(seed=seed, top_p=kept / vocab) for seed in range(30)]
        wide = generation(top_p=1 - 0.5 / vocab)
        together = look(torch.zeros(31, vocab), [*narrow, wide])[:-1]
        again = [generation(seed=seed, top_p=kept / vocab) for seed in range(30)]
        assert [look(torch.zeros(1, vocab), [one])[0] for one in again] == together
        # Their next draws begin where the last ones ended.
        assert look(torch.zeros(30, vocab), narrow) == together


@pytest.mark.parametrize("vocab", [40, 97, 1000])
@pytest.mark.parametrize("top_k", [0, 30, 10**9])
def test_a_draw_is_the_same_however_many_tokens_are_looked_at(vocab: int, top_k: int) -> None:
    """Tokens are as likely as six others, and a share ends right between two."""
    logits = (torch.arange(vocab) // 7 * -0.3)[torch.randperm(vocab, generator=torch.Generator().manual_seed(0))]
    row = torch.softmax(logits, dim=-1)
    shares = [share for share in row.sort(descending=True).values.double().cumsum(0).tolist() if share < 1]
    params = [generation(top_p=share, top_k=top_k).request.sampling for share in shares]
    weights, numbers = row.expand(len(shares), -1), [uniform(1, n) for n in range(len(shares))]
    whole = torch.stack(sampler._draw_among(weights, params, numbers, vocab), dim=1)
    assert not whole[:, 2].any()
    assert torch.equal(torch.stack(sampler._draw_in_order(weights, params, numbers), dim=1), whole)
    for width in (32, 36, 60, 512):
        if width < vocab:
            found = torch.stack(sampler._draw_among(weights, params, numbers, width), dim=1)
            sure = found[:, 2] == 0
            assert torch.equal(found[sure], whole[sure])
            assert sure.any()


def test_a_request_that_keeps_many_tokens_is_searched_for_as_many_at_once() -> None:
    flat, steep = row(2400, scale=0.1), row(2400, scale=20.0)
    sequence = generation(top_p=0.9)
    for logits, is_revised in ((flat, True), (flat, False), (steep, False), (flat, True)):
        begun = Draws(logits[None], [sequence])
        first = begun.token_ids.tolist()
        (draw,) = begun.collect()
        assert (draw.token_id != first[0]) is is_revised is bool(begun.revised)
    assert 128 < sequence.num_kept < 2400


@pytest.mark.parametrize("temperature", [0.05, 0.1, 0.2, 1.0])
@pytest.mark.parametrize("params", [{"top_k": 20}, {"top_k": 100}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}])
def test_tokens_without_any_weight_do_not_widen_the_search(temperature: float, params: dict[str, Any]) -> None:
    """At a low temperature nearly all probabilities are 0, so the last candidate is as likely as those beyond it."""
    weights = torch.softmax(row(5000, scale=8.0)[None] / temperature, dim=-1)
    sampling = generation(temperature=temperature, **params).request.sampling
    assert sampler._draw_among(weights, [sampling], [0.5], 128)[2].tolist() == [0]


@pytest.mark.parametrize(("top_k", "top_p", "width"), [(500, 0.9, 1024), (500, 1.0, 128), (10**9, 0.9, 128)])
def test_the_search_begins_with_as_many_tokens_as_a_share_of_the_top_k_needs(
    top_k: int, top_p: float, width: int
) -> None:
    begun = Draws(row(5000)[None], [generation(top_k=top_k, top_p=top_p)])
    assert begun._width(0) == width
    begun.collect()
    assert not begun.revised


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.sampled_from([0.0, 1e-40, 1e-12, 1e-3, 0.25, 1.0]) | st.floats(0, 1, width=32), min_size=1),
    share=st.floats(0, 1, exclude_max=True),
)
def test_an_order_is_that_of_a_sort(values: list[float], share: float) -> None:
    weights = np.array(values, dtype=np.float32) / np.float32(max(1.0, sum(values)))  # as of a softmax
    ranked = sorted(range(len(values)), key=lambda token: (-weights[token], token))
    sums = units(weights[ranked]).cumsum()
    order = Order(weights)
    assert [order.token(rank) for rank in range(len(values))] == ranked
    assert [order.sum(rank + 1) for rank in range(len(values))] == sums.tolist()
    amount = max(1.0, share * float(sums[-1]))
    assert order.reaching(amount) == min(int((sums < amount).sum()) + 1, len(values))
    assert order.at_least(share) == int((weights.astype(np.float64) >= share).sum())


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 50, "logprobs": 20}, {"logprobs": 3}])
def test_a_long_row_alone_on_many_threads_gives_the_same_as_in_company_on_one(params: dict[str, Any]) -> None:
    """Torch splits the reduction of one long row over its threads, which moves the last bits."""
    logits = torch.stack([row(40_001, seed, scale=2.0) for seed in range(64)])

    def drawn(logits: torch.Tensor, seeds: Sequence[int]) -> list[Sampled]:
        return sample(logits, [generation(seed=seed, **params) for seed in seeds])

    with computed_by(1):
        together = drawn(logits, range(64))
    with computed_by(4):
        assert [drawn(logits[i : i + 1], [i])[0] for i in range(64)] == together


class computed_by:  # noqa: N801 - reads as a word
    """With this many threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._threads)

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self._before)


def test_greedy_takes_the_likeliest_and_the_lowest_id_of_several() -> None:
    logits = torch.zeros(3, 5000)
    logits[0, 4321] = 1.0
    logits[1, [77, 4000, 4999]] = 2.0
    chosen = sample(logits, [generation(temperature=0.0) for _ in range(3)])
    assert [draw.token_id for draw in chosen] == [4321, 77, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_smallest_temperatures_draw_the_likeliest_token(temperature: float, top_p: float) -> None:
    logits = row(500) * 100
    counts = draws(logits, 50, temperature=temperature, top_p=top_p, logprobs=2)
    assert int(counts[logits.argmax()]) == 50


def test_the_largest_temperature_draws_evenly() -> None:
    logits = row(50)
    assert_drawn_from(draws(logits, temperature=1e6), torch.full((50,), 0.02, dtype=torch.float64))


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_narrowest_truncation_leaves_the_likeliest_token(params: dict[str, Any]) -> None:
    logits = row(2000)
    assert int(draws(logits, 200, **params)[logits.argmax()]) == 200


def test_top_k_beyond_the_vocabulary_keeps_all_of_it() -> None:
    logits = row(30)
    assert_drawn_from(draws(logits, top_k=31, top_p=0.9), warped(logits, 1.0, 0, 0.9, 0.0))


def test_top_k_keeps_exactly_k_of_tokens_that_are_equally_likely() -> None:
    counts = draws(torch.zeros(50), top_k=7)
    assert int((counts > 0).sum()) == 7
    assert_drawn_from(counts[counts > 0], torch.full((7,), 1 / 7, dtype=torch.float64))


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.999}, {"temperature": 0.0}])
def test_tokens_at_minus_infinity_are_never_drawn(params: dict[str, Any]) -> None:
    logits = torch.full((3000,), float("-inf"))
    logits[[5, 2998]] = 0.0
    counts = draws(logits, 200, **params)
    assert int(counts[[5, 2998]].sum()) == 200


def test_all_mass_on_one_token_draws_it_even_when_the_number_rounds_to_the_end() -> None:
    logits = torch.full((4, 1500), -1e4)
    logits[:, 3] = 0.0
    params: list[dict[str, Any]] = [{}, {"top_p": 0.5}, {"top_k": 1500}, {"min_p": 0.5}]
    chosen = sample(logits, [generation(seed=i, **p) for i, p in enumerate(params)])
    assert [draw.token_id for draw in chosen] == [3] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.9, "logprobs": 2}])
def test_a_row_that_is_not_finite_has_no_token_and_changes_no_other(bad: float, params: dict[str, Any]) -> None:
    logits = torch.stack([row(100, seed) for seed in range(3)])
    expected = sample(logits, [generation(seed=i, **params) for i in range(3)])
    logits[1, 50] = bad
    found = sample(logits, [generation(seed=i, **params) for i in range(3)])
    assert found == [expected[0], Sampled(None), expected[2]]
    nothing = sample(torch.full((1, 9), float("-inf")), [generation(**params)])
    assert nothing == [Sampled(None)]


def test_a_draw_depends_on_seed_and_output_index_alone() -> None:
    logits = row(1000, scale=0.1)

    def drawn(seed: int, index: int) -> int | None:
        return sample(logits[None], [generation(output=[0] * index, seed=seed)])[0].token_id

    assert len({drawn(seed, 0) for seed in range(40)}) > 30
    assert len({drawn(1, index) for index in range(40)}) > 30
    assert [drawn(9, 4) for _ in range(3)] == [drawn(9, 4)] * 3


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_the_number_behind_a_draw_is_at_least_0_and_below_1(seed: int, index: int) -> None:
    assert 0 <= uniform(seed, index) < 1
    assert uniform(seed, index) == uniform(seed, index)


def test_the_numbers_behind_the_draws_are_even() -> None:
    tenths = torch.tensor([int(uniform(seed, index) * 10) for seed in range(50) for index in range(80)])
    assert_drawn_from(torch.bincount(tenths, minlength=10), torch.full((10,), 0.1, dtype=torch.float64))


def test_the_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    logits = row(50)
    sequence = generation((3, 9, 9), (12, 40), temperature=0.0, repetition_penalty=1.4, logprobs=20)
    penalised = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[3, 9, 9, 12, 40]]), logits[None].clone())[0]
    assert_reports(sample(logits[None], [sequence])[0], penalised)


def test_presence_and_frequency_penalties_count_output_tokens_only() -> None:
    logits = row(50)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    sequence = generation((3, 9), (12, 40, 12), temperature=0.0, logprobs=20, **penalties)
    expected = logits.clone()
    expected[12] -= 0.5 + 2 * 0.25
    expected[40] -= 0.5 + 0.25
    assert_reports(sample(logits[None], [sequence])[0], expected)


def test_counts_that_are_kept_up_are_those_of_a_recount() -> None:
    logits = row(50)
    params = {"temperature": 0.0, "frequency_penalty": 0.5, "logprobs": 20}
    kept = generation(output=(4, 4), **params)
    sample(logits[None], [kept])
    kept.append(4)
    kept.append(7)
    assert sample(logits[None], [kept]) == sample(logits[None], [generation(output=(4, 4, 4, 7), **params)])


def test_a_logit_bias_is_added_before_everything_is_drawn_or_reported() -> None:
    logits = row(50)
    bias = ((4, 3.0), (int(logits.argmax()), -100.0))
    expected = logits.clone()
    for token_id, value in bias:
        expected[token_id] += value
    assert_reports(sample(logits[None], [generation(temperature=0.0, logit_bias=bias, logprobs=20)])[0], expected)
    assert_drawn_from(draws(logits, logit_bias=bias), torch.softmax(expected.double(), dim=-1))


def assert_reports(draw: Sampled, logits: torch.Tensor) -> None:
    """The draw is greedy, and its log-probabilities are those of this row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    assert draw.token_id == int(logits.argmax())
    assert draw.logprob is not None
    assert draw.logprob.logprob == pytest.approx(float(logprobs.max()), abs=1e-5)
    ids = [token_id for token_id, _ in draw.logprob.top]
    assert ids == logprobs.topk(len(ids)).indices.tolist()
    assert [value for _, value in draw.logprob.top] == pytest.approx(logprobs.topk(len(ids)).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 2.0])
def test_log_probabilities_are_those_of_the_scaled_distribution_before_truncation(temperature: float) -> None:
    logits = row(400)
    expected = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
    counts = [None, 0, 1, 20]
    sequences = [generation(seed=7, temperature=temperature, top_k=2, logprobs=count) for count in counts]
    for count, draw in zip(counts, sample(logits.expand(4, -1), sequences), strict=True):
        if count is None:
            assert draw.logprob is None
            continue
        assert draw.logprob is not None
        assert draw.logprob.token_id == draw.token_id
        assert draw.logprob.logprob == pytest.approx(float(expected[draw.token_id]), abs=1e-5)
        best = expected.topk(count)
        assert [token_id for token_id, _ in draw.logprob.top] == best.indices.tolist()
        assert [value for _, value in draw.logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_no_more_alternatives_are_reported_than_there_are_tokens() -> None:
    draw = sample(row(8)[None], [generation(logprobs=20)])[0]
    assert draw.logprob is not None
    assert len(draw.logprob.top) == 8


def test_prompt_tokens_are_scored_under_the_scaled_distribution() -> None:
    logits = torch.stack([row(90, seed) for seed in range(3)])
    params = generation(temperature=0.5, prompt_logprobs=2).request.sampling
    scores = prompt_logprobs(logits, [4, 80, 0], params)
    expected = torch.log_softmax(logits / 0.5, dim=-1)
    assert [score.logprob for score in scores] == pytest.approx(
        [float(expected[i, token_id]) for i, token_id in enumerate([4, 80, 0])], abs=1e-5
    )
    assert [[token_id for token_id, _ in score.top] for score in scores] == expected.topk(2).indices.tolist()


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_the_smallest_temperature_is_greedy_and_its_log_probabilities_are_no_nan() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.999])
    assert draws(logits, 50, temperature=1e-300).tolist() == [0, 50, 0, 0]
