"""Decoding that runs ahead of the host changes nothing but when the device is told what."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.interface.protocol import FinishReason, GenerateRequest, TokenDelta
from engines.loop import Event
from engines.planning.sequence import TokenSequence
from engines.sampling.sampler import Draws, Sampled, Sampler
from tests.support.engines.engine_harness import request
from tests.support.engines.loop_drive import NAN, RAISES, Bench, HashRunner, greedy

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.99, "logprobs": 3},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "logprobs": 0},
    {"prompt_logprobs": 2},
    {"logit_bias": ((3, 4.0),), "temperature": 0.5},
]


FEW_CANDIDATES = partial(Draws, candidates=4)
"""So that truncation now and then keeps more tokens than were looked at first."""


def bench_of(runner: HashRunner, num_blocks: int = 100, sampler: Sampler = FEW_CANDIDATES) -> Bench:
    return Bench(runner, num_blocks, sampler)


@dataclass(frozen=True)
class Work:
    """Requests, and the steps after which each arrives and perhaps leaves."""

    requests: Sequence[GenerateRequest]
    arrivals: Sequence[int]
    aborts: dict[int, int] = field(default_factory=dict)


def work_of(rng: Random) -> Work:
    requests = []
    for index in range(rng.randrange(1, 12)):
        prompt = [rng.randrange(40) for _ in range(rng.choice((1, 2, 15, 16, 17, 40)))]
        if rng.random() < 0.1:
            prompt[0] = rng.choice((RAISES, NAN))
        stops = frozenset(rng.sample(range(40), rng.choice((0, 0, 4))))
        sampling = {"max_tokens": rng.choice((0, 1, 2, 8, 30)), "seed": index, "stop_token_ids": stops}
        requests.append(request(prompt, tenant=rng.choice("ab"), **sampling, **rng.choice(SAMPLING)))
    arrivals = [rng.choice((0, 0, rng.randrange(40))) for _ in requests]
    aborts = {index: rng.randrange(40) for index in range(len(requests)) if rng.random() < 0.15}
    return Work(requests, arrivals, aborts)


def run(work: Work, runner: HashRunner, num_blocks: int) -> dict[str, list[Event]]:
    bench = bench_of(runner, num_blocks=num_blocks)
    with torch.inference_mode():
        for step in range(1000):
            bench.add(*(made for made, at in zip(work.requests, work.arrivals, strict=True) if at == step))
            for index, at in work.aborts.items():
                if at == step:
                    bench.loop.abort(work.requests[index].request_id)
            if not bench.loop.step() and step > 40:
                break
    bench.assert_clean()
    assert not bench.ended
    return {made.request_id: bench.events(made) for made in work.requests}


def alike(events: list[Event]) -> list[Any]:
    """What must not depend on when a step began: errors by their kind, and not what the prefix cache had by then."""
    return [
        replace(event, cached_tokens=0) if isinstance(event, TokenDelta) else (type(event), str(event))
        for event in events
    ]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_whatever_comes_and_goes_every_request_gets_what_it_gets_without(seed: int) -> None:
    rng = Random(seed)
    work, num_blocks, spoils = work_of(rng), rng.choice((12, 20, 100)), rng.choice((None, 7))
    plain = run(work, HashRunner(overlaps=False, spoils=spoils), num_blocks)
    refuses = {rng.randrange(30) for _ in range(rng.choice((0, 3)))}
    found = run(work, HashRunner(overlaps=True, spoils=spoils, refuses=refuses), num_blocks)
    leaving = {work.requests[index].request_id for index in work.aborts}
    for request_id, events in plain.items():
        one, other = alike(events), alike(found[request_id])
        if request_id in leaving:
            shorter = min(len(one), len(other))
            one, other = one[:shorter], other[:shorter]
        assert one == other


def test_the_device_has_the_next_step_before_this_ones_tokens_are_out() -> None:
    bench = bench_of(HashRunner(overlaps=True))
    made = [request((i, i + 1), max_tokens=6) for i in range(3)]
    bench.add(*made)
    seen: list[int] = []
    decode = bench.runner.decode

    def observed(chunks: Any, carried: Any = None) -> Any:
        seen.append(len(bench.tokens(made[0])))
        return decode(chunks, carried)

    bench.runner.decode = observed  # type: ignore[method-assign]
    bench.finish()
    # The first token comes from the prefill. The second decode step is asked for before the first one's token is out.
    assert seen == [1, 1, 2, 3, 4]
    assert bench.runner.decodes == [None, 3, 3, 3, 3]
    for one in made:
        assert bench.tokens(one) == greedy(one.prompt_token_ids, 6)


def test_who_ends_at_its_length_is_not_decoded_again() -> None:
    bench = bench_of(HashRunner(overlaps=True))
    bench.add(request((1, 2), max_tokens=3), request((3, 4), max_tokens=6))
    bench.finish()
    assert bench.runner.decodes == [None, 2, 1, 1, 1]
    bench.assert_clean()


def test_who_ends_with_a_stop_token_is_decoded_once_more_in_vain() -> None:
    bench, stop = bench_of(HashRunner(overlaps=True)), greedy((1, 2), 3)[-1]
    short = request((1, 2), max_tokens=9, stop_token_ids=frozenset({stop}))
    other = request((3, 4), max_tokens=9)
    bench.add(short, other)
    bench.finish()
    assert bench.runner.decodes[:4] == [None, 2, 2, 1]
    assert bench.deltas(short)[-1].finish_reason is FinishReason.STOP
    assert bench.tokens(other) == greedy((3, 4), 9)
    bench.assert_clean()


def test_a_request_that_arrives_is_admitted_in_the_next_step() -> None:
    bench, first = bench_of(HashRunner(overlaps=True)), request((1, 2), max_tokens=30)
    bench.add(first)
    for _ in range(5):
        bench.loop.step()
    late = request((5, 6), max_tokens=3)
    bench.add(late)
    bench.loop.step()  # takes in what is under way, and gives the device nothing that would be in the way
    bench.loop.step()
    assert bench.tokens(late) == greedy((5, 6), 1)
    bench.finish()
    assert bench.tokens(first) == greedy((1, 2), 30)


def test_requests_that_wait_for_room_do_not_keep_the_others_from_running_ahead() -> None:
    bench = bench_of(HashRunner(overlaps=True), num_blocks=1 + 8)
    running, waiting = request([1] * 60, max_tokens=40), [request([2] * 100, max_tokens=2) for _ in range(3)]
    bench.add(running, *waiting)
    bench.finish()
    assert bench.runner.decodes[:39] == [None, *[1] * 38]
    for made in (running, *waiting):
        assert bench.tokens(made) == greedy(made.prompt_token_ids, made.sampling.max_tokens)


def test_a_token_that_is_found_to_be_another_is_computed_anew() -> None:
    bench = bench_of(HashRunner(overlaps=True))
    wide = [request((i,), max_tokens=12, temperature=3.0, top_p=0.95, seed=i) for i in range(4)]
    bench.add(*wide)
    bench.finish()
    plain = bench_of(HashRunner(overlaps=False))
    again = [replace(made, request_id=f"again-{made.request_id}") for made in wide]
    plain.add(*again)
    plain.finish()
    assert [bench.tokens(made) for made in wide] == [plain.tokens(made) for made in again]
    assert bench.runner.decodes.count(None) > 1, "after four candidates of fifty some should have been wrong"


def test_a_token_that_is_found_to_be_another_holds_its_request_up_for_no_longer_than_that() -> None:
    def forgetful(logits: torch.Tensor, sequences: Sequence[TokenSequence]) -> Draws:
        """As if each draw kept more tokens than the one before."""
        for sequence in sequences:
            sequence.num_kept = 0
        return FEW_CANDIDATES(logits, sequences)

    bench = bench_of(HashRunner(overlaps=True), sampler=forgetful)
    others = [request((i, 1), max_tokens=300) for i in range(3)]
    wide = request((5,), max_tokens=12, temperature=3.0, top_p=0.95, seed=3)
    bench.add(*others, wide)
    while len(bench.tokens(wide)) < 12:
        assert bench.loop.step()
    assert bench.runner.decodes.count(None) > 3, "some should have been wrong"
    assert len(bench.tokens(others[0])) < 2 * 12 + 2


def others_before(bench: Bench, long: GenerateRequest, waiting: GenerateRequest) -> int:
    """How many tokens of another request come until the first of one that waits."""
    before = len(bench.tokens(long))
    while not bench.events(waiting):
        assert bench.loop.step()
    return len(bench.tokens(long)) - before


def started(*requests: GenerateRequest, charged: int = 1, overlaps: bool = True) -> Bench:
    """A bench of 16 blocks where the first request decodes, and the others wait. Tenant b has had so many tokens."""
    bench = bench_of(HashRunner(overlaps=overlaps), num_blocks=1 + 16)
    bench.add(request([4] * charged, max_tokens=1, tenant="b"))
    bench.finish()
    bench.add(*requests)
    for _ in range(5):
        bench.loop.step()
    assert len(bench.tokens(requests[0])) > 1
    assert not any(bench.events(made) for made in requests[1:])
    return bench


def test_who_stands_behind_a_request_that_does_not_fit_is_admitted_when_that_one_leaves() -> None:
    long, large = request([1] * 20, max_tokens=200, tenant="a"), request([2] * 300, tenant="a")
    small = request([3] * 20, max_tokens=2, tenant="b")
    bench = started(long, large, small, charged=200)
    bench.loop.abort(large.request_id)
    assert others_before(bench, long, small) < 4


def test_who_stands_behind_a_request_that_does_not_fit_is_admitted_when_it_is_its_turn() -> None:
    """By charging: the tenant of the large one has had more by then."""
    long, large = request([1] * 20, max_tokens=200, tenant="a"), request([2] * 300, tenant="a")
    small = request([3] * 20, max_tokens=2, tenant="b")
    found = []
    for overlaps in (False, True):
        bench = started(long, large, small, charged=50, overlaps=overlaps)
        found.append(others_before(bench, long, small))
    assert abs(found[0] - found[1]) < 4


def test_a_request_that_takes_over_an_id_is_tried_anew() -> None:
    long, large = request([1] * 20, max_tokens=200), request([2] * 300)
    bench = started(long, large)
    small = replace(request([3] * 20, max_tokens=2), request_id=large.request_id)
    bench.loop.abort(large.request_id)
    bench.add(small)
    assert others_before(bench, long, small) < 4


def test_who_waits_for_a_place_takes_it_in_the_step_after_one_ends_at_its_length() -> None:
    found = []
    for overlaps in (False, True):
        bench = bench_of(HashRunner(overlaps=overlaps))
        others = [request((i, 1), max_tokens=50) for i in range(7)]
        bench.add(*others, request((9, 9), max_tokens=5), waiting := request((8, 8), max_tokens=2))
        found.append(others_before(bench, others[0], waiting))
    assert found[0] == found[1]


@pytest.mark.parametrize("stops", [False, True])
def test_room_that_becomes_free_is_taken_though_the_others_run_ahead(stops: bool) -> None:
    bench, prompt = bench_of(HashRunner(overlaps=True), num_blocks=1 + 16), [2] * 100
    end = {"max_tokens": 100, "stop_token_ids": frozenset(greedy(prompt, 5)[-1:])} if stops else {"max_tokens": 5}
    long, short = request([1] * 20, max_tokens=200), request(prompt, **end)
    waiting = request([3] * 120, max_tokens=2)
    bench.add(long, short, waiting)
    while not bench.events(waiting):
        assert bench.loop.step()
    assert len(bench.tokens(short)) == 5
    assert len(bench.tokens(long)) < 30


def test_what_fails_only_when_it_is_waited_for_is_computed_again() -> None:
    collects = [0]

    class FailingNowAndThen(Draws):
        def collect(self) -> list[Sampled]:
            collects[0] += 1
            if collects[0] in (3, 7):
                raise RuntimeError("an illegal memory access was encountered")
            return super().collect()

    bench, made = bench_of(HashRunner(overlaps=True), sampler=FailingNowAndThen), request((1, 2), max_tokens=12)
    bench.add(made)
    decode = bench.runner.decode

    def with_rubbish(chunks: Any, carried: Any = None) -> Any:
        """Also what follows on the device is of no use."""
        if carried is not None and collects[0] + 1 in (3, 7):
            carried = replace(carried, token_ids=torch.zeros_like(carried.token_ids))
        return decode(chunks, carried)

    bench.runner.decode = with_rubbish  # type: ignore[method-assign]
    bench.finish()
    assert collects[0] == 12 + 2
    assert bench.tokens(made) == greedy((1, 2), 12)
    bench.assert_clean()


def test_log_probabilities_of_a_revised_token_are_its_own() -> None:
    logits = torch.linspace(0, 1, 50)[None].expand(40, -1)
    requests = [request((1,), temperature=1.0, top_p=0.99, logprobs=2, seed=seed) for seed in range(40)]
    sequences = [TokenSequence.of(made, Bench) for made in requests]  # type: ignore[arg-type]
    draws = FEW_CANDIDATES(logits, sequences)
    first = draws.token_ids.tolist()
    found = draws.collect()
    expected = torch.log_softmax(logits[0], dim=-1)
    assert len(draws.revised) > 20
    for row, (before, draw) in enumerate(zip(first, found, strict=True)):
        assert (draw.token_id != before) == (row in draws.revised)
        assert draw.logprob is not None
        assert draw.token_id is not None
        assert math.isclose(draw.logprob.logprob, float(expected[draw.token_id]), abs_tol=1e-5)
