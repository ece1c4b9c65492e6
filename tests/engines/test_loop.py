"""The loop with a runner whose logits are a hash of the text, and which fails where it is told to."""

import time
from collections.abc import Callable, Sequence
from threading import Thread

import pytest
import torch

from engines.interface.errors import EngineError, NonFiniteLogits
from engines.interface.protocol import FinishReason, TokenDelta
from engines.loop import EngineLoop
from engines.planning.prefill_pace import PrefillPace
from engines.planning.sequence import NO_SINK, TokenSequence
from tests.support.engines.engine_harness import request
from tests.support.engines.loop_drive import BREAKS, MISSHAPEN, NAN, RAISES, Bench, HashRunner, greedy, logits_after

NewBench = Callable[..., Bench]


@pytest.fixture(params=[False, True], ids=["waits", "overlaps"])
def new_bench(request: pytest.FixtureRequest) -> NewBench:
    """All of this holds whether or not decoding runs ahead of the host."""

    def made(*, num_blocks: int = 100, repeatable: bool = True) -> Bench:
        return Bench(HashRunner(overlaps=request.param, repeatable=repeatable), num_blocks)

    return made


def test_a_generation_ends_at_its_length_and_has_one_token_in_each_delta(new_bench: NewBench) -> None:
    bench, made = new_bench(), request((1, 2, 3), max_tokens=4)
    bench.add(made)
    bench.finish()
    assert bench.tokens(made) == greedy((1, 2, 3), 4)
    assert [delta.finish_reason for delta in bench.deltas(made)] == [None, None, None, FinishReason.LENGTH]
    bench.assert_clean()


def test_a_generation_ends_with_the_stop_token_even_at_its_length(new_bench: NewBench) -> None:
    expected = greedy((1, 2, 3), 4)
    for count in (2, 4):
        stop = expected[count - 1]
        bench = new_bench()
        made = request((1, 2, 3), max_tokens=4, stop_token_ids=frozenset({stop}))
        bench.add(made)
        bench.finish()
        assert bench.tokens(made) == expected[: expected.index(stop) + 1]
        assert bench.deltas(made)[-1].finish_reason is FinishReason.STOP


def test_what_is_said_once_is_said_on_the_first_delta(new_bench: NewBench) -> None:
    bench, prompt = new_bench(), tuple(range(33))
    first, second = (request(prompt, max_tokens=3, logprobs=1) for _ in range(2))
    scored = request(prompt, max_tokens=3, prompt_logprobs=1)
    for made in (first, second, scored):
        bench.add(made)
        bench.finish()
    assert [delta.cached_tokens for delta in bench.deltas(second)] == [32, 0, 0]
    assert all(len(delta.logprobs) == 1 for delta in bench.deltas(second))
    assert [len(delta.prompt_logprobs) for delta in bench.deltas(scored)] == [33, 0, 0]
    assert not any(delta.logprobs for delta in bench.deltas(scored))


def test_a_prompt_can_be_scored_without_a_token(new_bench: NewBench) -> None:
    bench, prompt = new_bench(), tuple(i % 40 for i in range(150))
    made = request(prompt, max_tokens=0, prompt_logprobs=0)
    bench.add(made)
    bench.finish()
    (delta,) = bench.deltas(made)
    assert delta.token_ids == ()
    assert delta.finish_reason is FinishReason.LENGTH
    assert_scores(delta, prompt)
    bench.assert_clean()


def assert_scores(delta: TokenDelta, prompt: Sequence[int]) -> None:
    assert len(delta.prompt_logprobs) == len(prompt)
    assert delta.prompt_logprobs[0] is None
    for position, score in enumerate(delta.prompt_logprobs[1:], start=1):
        expected = torch.log_softmax(torch.tensor(logits_after(prompt[:position])), dim=-1)[prompt[position]]
        assert score is not None
        assert score.token_id == prompt[position]
        assert score.logprob == pytest.approx(float(expected), abs=1e-5)


def test_a_prompt_whose_scoring_was_interrupted_by_a_preemption_has_every_score_once(new_bench: NewBench) -> None:
    bench, prompt = new_bench(num_blocks=1 + 43), tuple(i % 40 for i in range(640))
    older = request([3] * 30, max_tokens=40)
    bench.add(older)
    bench.loop.step()
    scored = request(prompt, max_tokens=4, prompt_logprobs=0)
    bench.add(scored)
    while not bench.scheduler.preemptions:
        assert bench.loop.step()
    assert not bench.events(scored), "it should have been interrupted in the middle of its prompt"
    bench.finish()
    assert_scores(bench.deltas(scored)[0], prompt)
    assert not any(delta.prompt_logprobs for delta in bench.deltas(scored)[1:])
    assert bench.tokens(scored) == greedy(prompt, 4)


@pytest.mark.parametrize("poison", [RAISES, MISSHAPEN])
def test_what_raises_for_one_request_fails_that_one_alone(new_bench: NewBench, poison: int) -> None:
    bench = new_bench()
    good = [request((i, i + 1), max_tokens=6) for i in range(4)]
    bad = request((1, poison, 2), max_tokens=6, prompt_logprobs=0)
    bench.add(*good[:2], bad, *good[2:])
    bench.finish()
    for made in good:
        assert bench.tokens(made) == greedy(made.prompt_token_ids, 6)
    (event,) = bench.events(bad)
    assert isinstance(event, EngineError)
    assert "could not be run for this request" in str(event)
    assert not bench.ended
    assert (bench.loop.counters.finished, bench.loop.counters.failed_requests) == (4, 1)
    bench.assert_clean()


@pytest.mark.parametrize("poison", [RAISES, MISSHAPEN, NAN])
def test_any_number_of_failures_in_a_row_leave_the_engine_running(new_bench: NewBench, poison: int) -> None:
    bench = new_bench()
    for _ in range(20):
        bench.add(request((poison,)))
        bench.finish()
    good = request((5, 6), max_tokens=3)
    bench.add(good)
    bench.finish()
    assert bench.tokens(good) == greedy((5, 6), 3)
    bench.assert_clean()


def test_logits_that_are_not_finite_fail_their_request_alone(new_bench: NewBench) -> None:
    bench = new_bench()
    good, bad = request((1, 2), max_tokens=4), request((1, NAN), max_tokens=4)
    scored = request((1, NAN, 5), max_tokens=0, prompt_logprobs=0)
    bench.add(bad, good, scored)
    bench.finish()
    assert bench.tokens(good) == greedy((1, 2), 4)
    assert [type(event) for made in (bad, scored) for event in bench.events(made)] == [NonFiniteLogits] * 2
    bench.assert_clean()


def test_a_runner_that_cannot_run_a_chunk_again_fails_all_of_the_batch_and_goes_on(new_bench: NewBench) -> None:
    bench = new_bench(repeatable=False)
    requests = [request((1, 2)), request((RAISES, 1))]
    bench.add(*requests)
    bench.finish()
    assert all(isinstance(bench.events(made)[0], EngineError) for made in requests)
    bench.assert_clean()


def test_those_who_decode_get_their_tokens_before_the_prefill_is_computed(new_bench: NewBench) -> None:
    bench = new_bench()
    first, second = request((1, 2), max_tokens=9), request(tuple(range(20)), max_tokens=9)
    bench.add(first)
    bench.loop.step()
    bench.add(second)
    bench.emitted.clear()
    bench.loop.step()
    assert [[request_id for request_id, _ in events] for events in bench.emitted] == [
        [first.request_id],
        [second.request_id],
    ]


def test_the_prefill_beside_decoding_follows_what_both_take(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.loop.pace = PrefillPace(limit=200, ratio=1e-6)
    bench.add(request(tuple(i % 40 for i in range(60)), max_tokens=3))
    assert bench.loop.step()
    assert bench.scheduler.prefill_limit == 200  # nothing has decoded yet
    bench.finish()
    assert bench.scheduler.prefill_limit == 32
    bench.loop.pace = PrefillPace(limit=200, ratio=1e9)
    bench.add(request(tuple(i % 40 for i in range(60)), max_tokens=3))
    bench.finish()
    assert bench.scheduler.prefill_limit == 200


def test_preemption_neither_repeats_nor_loses_a_token(new_bench: NewBench) -> None:
    bench = new_bench(num_blocks=1 + 7)
    requests = [request([i] * 30, max_tokens=40, logprobs=0) for i in range(4)]
    bench.add(*requests)
    bench.finish()
    for made in requests:
        assert bench.tokens(made) == greedy(made.prompt_token_ids, 40)
    assert bench.scheduler.preemptions > 0
    bench.assert_clean()


def test_the_counters_count(new_bench: NewBench) -> None:
    bench, prompt = new_bench(), tuple(range(40))
    made = [request(prompt, max_tokens=5), request(prompt, max_tokens=5), request((1,), max_tokens=1)]
    for one in made:
        bench.add(one)
        bench.finish()
    counters = bench.loop.counters
    assert counters.requests == counters.finished == 3
    assert counters.prefill_tokens == 40 + (40 - 32) + 1
    assert counters.decode_tokens == 4 + 4
    assert counters.cached_tokens == 32
    assert counters.steps == 5 + 5 + 1
    assert counters.step_seconds > 0


def test_an_abort_at_any_step_leaves_nothing_and_disturbs_nobody(new_bench: NewBench) -> None:
    for step in range(8):
        bench = new_bench(num_blocks=1 + 9)
        stays, leaves = request([7] * 60, max_tokens=5), request([8] * 60, max_tokens=50)
        bench.add(stays, leaves)
        for _ in range(step):
            bench.loop.step()
        before = len(bench.events(leaves))
        bench.loop.abort(leaves.request_id)
        bench.loop.abort("never heard of")
        bench.finish()
        assert bench.tokens(stays) == greedy([7] * 60, 5)
        assert len(bench.events(leaves)) == before
        bench.assert_clean()


def test_time_without_work_is_no_stall(new_bench: NewBench) -> None:
    bench = new_bench()
    bench.loop.last_progress -= 1000
    bench.add(request((1, 2)))
    assert time.monotonic() - bench.loop.last_progress < 100
    bench.finish()
    bench.loop.last_progress -= 1000
    assert not bench.loop.step()
    assert time.monotonic() - bench.loop.last_progress < 100


def run_in_thread(bench: Bench, *commands: Callable[[EngineLoop], None]) -> Thread:
    for command in commands:
        assert bench.loop.post(command)
    thread = Thread(target=bench.loop.run)
    thread.start()
    return thread


def test_a_stopped_loop_says_so_once_and_takes_no_more_commands(new_bench: NewBench) -> None:
    bench = new_bench()
    thread = run_in_thread(bench, lambda loop: loop.stop())
    thread.join(timeout=30)
    assert [str(error) for error in bench.ended] == ["The engine was stopped."]
    assert not bench.loop.failed
    assert not bench.loop.post(lambda loop: None)


@pytest.mark.parametrize("breakage", ["the device", "the loop's own state"])
def test_a_fault_that_is_no_requests_own_ends_the_loop_and_says_so(new_bench: NewBench, breakage: str) -> None:
    bench = new_bench()

    def break_it(loop: EngineLoop) -> None:
        if breakage == "the device":
            loop.add(TokenSequence.of(request((BREAKS,)), NO_SINK))
        else:
            raise AssertionError("an invariant does not hold")

    run_in_thread(bench, break_it).join(timeout=30)
    assert [str(error) for error in bench.ended] == ["The engine has failed."]
    assert bench.loop.failed
    assert not bench.loop.post(lambda loop: None)
