"""What the scheduler promises, step by step, over random work (see `scheduler_drive` for the checks of each step)."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.planning.scheduler import BYPASS_LIMIT, SCORED_TOKENS
from engines.planning.sequence import TokenSequence
from tests.support.engines.scheduler_drive import BLOCK, Drive, Slots, drive, sequence_of

LONGEST = 6 * BLOCK


@dataclass(frozen=True)
class Arrival:
    """A request at a step; `patience`: after how many steps it is aborted, if it has not ended by then."""

    step: int
    prompt: tuple[int, ...]
    max_tokens: int
    tenant: str
    adapter: str
    patience: int | None
    scored: bool

    def sequence(self) -> TokenSequence:
        return sequence_of(self.prompt, self.max_tokens, tenant=self.tenant, adapter=self.adapter, scored=self.scored)


# Few distinct tokens in repeating patterns, so that prompts share prefixes of several blocks.
Prompts = st.builds(
    lambda pattern, length: tuple((pattern * length)[:length]),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
    st.integers(1, LONGEST - 20),
)
Arrivals = st.builds(
    Arrival,
    step=st.integers(0, 60),
    prompt=Prompts,
    max_tokens=st.integers(1, 20),
    tenant=st.sampled_from("ab"),
    adapter=st.sampled_from(["", "", "1", "2", "3"]),
    patience=st.none() | st.integers(0, 40),
    scored=st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(Arrivals, min_size=1, max_size=25),
    num_blocks=st.integers(1 + LONGEST // BLOCK, 30),
    num_slots=st.integers(1, 3),
    max_running=st.integers(1, 8),
    budgets=st.tuples(st.integers(1, 80), st.integers(1, 40)),
    prefix_cache=st.booleans(),
)
def test_all_requests_end_with_the_right_tokens_and_leave_nothing_behind(
    arrivals: list[Arrival],
    num_blocks: int,
    num_slots: int,
    max_running: int,
    budgets: tuple[int, int],
    prefix_cache: bool,
) -> None:
    slots = Slots(num_slots)
    work = drive(
        num_blocks=num_blocks,
        slots=slots,
        max_running=max_running,
        max_step_tokens=budgets[0],
        max_step_tokens_decoding=budgets[1],
        prefix_cache=prefix_cache,
    )
    patience = _run(work, arrivals)
    assert len(work.finished) == len(arrivals)
    for sequence in work.finished:
        if patience[id(sequence)] is None:
            assert sequence.token_ids[sequence.num_prompt :] == _alone(sequence)
    assert work.pool.num_free == num_blocks - 1
    assert not any(slots.pins.values())
    assert not len(work.scheduler.queue)


def _run(work: Drive, arrivals: list[Arrival]) -> dict[int, int | None]:
    """Runs to the end; returns the patience of each sequence."""
    ahead = sorted(arrivals, key=lambda arrival: arrival.step)
    patience: dict[int, int | None] = {}
    leaving: list[tuple[int, TokenSequence]] = []
    now = 0
    while ahead or not work.scheduler.is_idle:
        while ahead and ahead[0].step <= now:
            arrival = ahead.pop(0)
            sequence = arrival.sequence()
            patience[id(sequence)] = arrival.patience
            work.add(sequence)
            if arrival.patience is not None:
                leaving.append((now + arrival.patience, sequence))
        for due, sequence in leaving:
            if due == now:
                work.abort(sequence)
        if not work.scheduler.is_idle:
            assert work.step(), "nothing could run although there was work"
        now += 1
        assert now < 50_000, "no end in sight"
    return patience


def _alone(sequence: TokenSequence) -> list[int]:
    work = drive()
    copy = sequence_of(
        sequence.request.prompt_token_ids, sequence.request.sampling.max_tokens, adapter=sequence.adapter_digest
    )
    work.add(copy)
    work.run()
    return copy.token_ids[copy.num_prompt :]


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    work = drive(max_step_tokens=64, max_step_tokens_decoding=16)
    decoding = sequence_of((1, 2, 3), 30)
    work.add(decoding)
    work.step()
    work.add(sequence_of(range(200)))
    for produced in range(2, 12):
        plan = work.step()
        assert decoding.num_output == produced
        assert sum(chunk.length for chunk in plan.prefill) == 16


def test_the_loop_may_shrink_the_prefill_beside_decoding_but_not_grow_it() -> None:
    work = drive(max_step_tokens=64, max_step_tokens_decoding=32)
    work.add(sequence_of((1, 2, 3), 30))
    work.step()
    work.add(sequence_of(range(200)))
    lengths = []
    for limit in (16, 64, None):
        work.scheduler.prefill_limit = limit
        lengths.append(sum(chunk.length for chunk in work.scheduler.plan().prefill))
    assert lengths == [16, 32, 32]


def test_a_very_long_prompt_leaves_half_of_each_step_to_those_behind_it() -> None:
    work = drive(max_step_tokens=64, max_step_tokens_decoding=32)
    long = sequence_of(range(400), 4)
    work.add(long)
    assert [chunk.length for chunk in work.step().prefill] == [64]  # nobody is behind it
    work.add(*(sequence_of(range(1000 * i, 1000 * i + 30), 4) for i in (1, 2)))
    assert [chunk.length for chunk in work.step().prefill] == [32, 30, 2]
    assert [chunk.length for chunk in work.step().prefill] == [16, 16]  # beside the first one, who decodes
    work.run()
    assert long.num_output == 4


def test_the_whole_budget_is_used_while_nobody_decodes() -> None:
    work = drive(max_step_tokens=64, max_step_tokens_decoding=16)
    work.add(sequence_of(range(200)), sequence_of(range(500, 600)))
    assert [sum(chunk.length for chunk in work.step().prefill) for _ in range(3)] == [64, 64, 64]


def test_prompts_that_are_scored_share_a_bound_on_the_rows_of_logits() -> None:
    work = drive(max_step_tokens=10 * SCORED_TOKENS)
    first, second = (sequence_of(range(SCORED_TOKENS + 30 + i), scored=True) for i in range(2))
    work.add(first, second, sequence_of(range(1000, 4000)))
    lengths = [[chunk.length for chunk in work.step().prefill] for _ in range(2)]
    assert lengths == [[SCORED_TOKENS, 9 * SCORED_TOKENS], [30, SCORED_TOKENS - 30, 9 * SCORED_TOKENS]]
    work.run()
    assert len(work.finished) == 3


def test_a_scored_prompt_that_was_preempted_after_its_first_token_takes_its_prefix_from_the_cache() -> None:
    work = drive(num_blocks=1 + 8)
    old, scored = sequence_of([1] * (2 * BLOCK), 4 * BLOCK), sequence_of([2] * (3 * BLOCK), 2 * BLOCK, scored=True)
    work.add(old, scored)
    while not work.scheduler.preemptions:
        assert work.step()
    assert scored.num_output
    assert not scored.blocks
    again: list[int] = []
    while scored not in work.finished:
        plan = work.step()
        assert plan
        again += [chunk.start for chunk in plan.prefill if chunk.sequence is scored]
    assert min(again) >= 2 * BLOCK


def test_a_second_request_with_the_same_prefix_computes_only_the_rest() -> None:
    work = drive()
    prompt = tuple(range(3 * BLOCK))
    first, second, third = sequence_of(prompt), sequence_of((*prompt, 7, 8)), sequence_of(prompt)
    for sequence in (first, second, third):
        work.add(sequence)
        work.run()
    assert [first.cached_len, second.cached_len] == [0, 3 * BLOCK]
    assert third.cached_len == 2 * BLOCK  # one token at least is computed, for its logits


def test_no_prefix_is_shared_between_adapters_or_taken_by_a_prompt_that_is_scored() -> None:
    work = drive()
    prompt = tuple(range(3 * BLOCK))
    others = [sequence_of(prompt, adapter="1"), sequence_of(prompt, adapter="2"), sequence_of(prompt, scored=True)]
    for sequence in (sequence_of(prompt), *others):
        work.add(sequence)
        work.run()
    assert [sequence.cached_len for sequence in others] == [0, 0, 0]


def test_the_youngest_is_preempted_and_comes_back_before_those_who_never_ran() -> None:
    work = drive(num_blocks=1 + 6, max_running=3)
    old, young, waiting = (sequence_of([seed] * (2 * BLOCK), 2 * BLOCK) for seed in range(3))
    work.add(old, young, waiting)
    while not work.scheduler.preemptions:
        work.step()
    assert work.scheduler.running == [old]
    work.run()
    assert work.finished == [old, young, waiting]


def test_nobody_smaller_slips_past_a_request_that_waits_for_memory() -> None:
    work = drive(num_blocks=1 + 6)
    work.add(sequence_of(range(4 * BLOCK - 5), 30))
    work.step()
    large = sequence_of(range(100, 100 + 4 * BLOCK), 1, tenant="large")
    small = sequence_of((1,), 1, tenant="small")
    work.add(large, small)
    work.run()
    assert work.admissions[1:] == [large, small]


def test_an_adapter_that_is_not_loaded_yet_holds_up_nobody_else() -> None:
    slots = Slots(2, loading=["1"])
    work = drive(slots=slots)
    slow, quick = sequence_of((1, 2), 3, adapter="1"), sequence_of((1, 2), 3)
    work.add(slow, quick)
    while quick not in work.finished:
        work.step()
    assert not work.step()
    slots.loading.clear()
    work.run()
    assert work.finished == [quick, slow]


def test_the_rarest_adapter_is_admitted_after_a_bounded_number_of_others() -> None:
    work = drive(slots=Slots(1), max_running=4, max_step_tokens=1000)
    work.add(*(sequence_of((1, 2, 3), 2 + i % 3, adapter="1") for i in range(20)))
    work.step()
    before = len(work.admissions)
    rare = sequence_of((1, 2, 3), 2, adapter="2")
    work.add(rare, *(sequence_of((1, 2, 3), 2 + i % 3, adapter="1") for i in range(4 * BYPASS_LIMIT)))
    while rare not in work.admissions:
        work.step()
    assert len(work.admissions) - before <= BYPASS_LIMIT + 1
    work.run()


@settings(max_examples=30, deadline=None)
@given(num_adapters=st.integers(2, 4), lengths=st.lists(st.integers(1, 30), min_size=4, max_size=8))
def test_every_adapter_is_admitted_after_a_bounded_number_of_others_with_one_slot(
    num_adapters: int, lengths: list[int]
) -> None:
    work = drive(slots=Slots(1), max_running=4, max_step_tokens=1000)
    for adapter in range(num_adapters):
        for i in range(60):
            work.add(sequence_of([adapter] * lengths[i % len(lengths)], 1 + i % 4, adapter=str(adapter + 1)))
    work.run()
    order = [sequence.adapter_digest for sequence in work.admissions]
    for adapter in set(order):
        places = [-1, *(place for place, digest in enumerate(order) if digest == adapter)]
        gaps = [b - a for a, b in pairwise(places)]
        # Each of the others can be bypassed up to the limit before it and then this one has its turn.
        assert max(gaps) <= (num_adapters - 1) * (BYPASS_LIMIT + work.max_running)


def _flood(tenants: dict[str, Callable[[int], TokenSequence]], count: int) -> list[TokenSequence]:
    return [make(number) for number in range(count) for make in tenants.values()]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, LONGEST - 24), min_size=2, max_size=6),
    outputs=st.lists(st.integers(1, 24), min_size=2, max_size=6),
    max_running=st.integers(1, 6),
    num_blocks=st.integers(1 + LONGEST // BLOCK, 60),
)
def test_two_tenants_that_both_wait_are_charged_alike_within_the_stated_bound(
    prompts: list[int], outputs: list[int], max_running: int, num_blocks: int
) -> None:
    work = drive(max_running=max_running, num_blocks=num_blocks, prefix_cache=False, max_step_tokens=200)

    def heavy(number: int) -> TokenSequence:
        return sequence_of(range(prompts[number % len(prompts)]), outputs[number % len(outputs)], tenant="heavy")

    def light(number: int) -> TokenSequence:
        return sequence_of((1, 2, 3), 2, tenant="light")

    work.add(*_flood({"heavy": heavy, "light": light}, 40))
    balance = []
    while {head.request.tenant for head in work.scheduler.queue.heads()} == {"heavy", "light"}:
        balance.append(work.charges.get("heavy", 0) - work.charges.get("light", 0))
        work.step()
    largest = LONGEST  # what an admission computes: a prompt, or prompt and output after a preemption
    assert max(balance) - min(balance) <= 2 * (largest + max_running * max(outputs))


@pytest.mark.parametrize("num_hot", [1, 50])
def test_a_quiet_tenant_waits_for_a_bounded_number_of_admissions_of_the_hot_ones(num_hot: int) -> None:
    work = drive(max_running=2)
    for number in range(400):
        work.add(sequence_of((1, 2, 3), 4, tenant=f"hot-{number % num_hot}"))
    for _ in range(50):
        work.step()
    before = len(work.admissions)
    quiet = sequence_of((1, 2, 3), 4, tenant="quiet")
    work.add(quiet)
    while quiet not in work.admissions:
        work.step()
    assert len(work.admissions) - before <= num_hot + work.max_running
