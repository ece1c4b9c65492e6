"""How chunks of sequences are laid out into one row of tokens."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, NO_SLOT, TokenSequence
from engines.tensors.batch import StepBatch, build_batch, wanted_rows
from tests.support.engines.engine_harness import request

CPU = torch.device("cpu")
BLOCK = 16


def chunk(
    start: int,
    length: int,
    *,
    total: int | None = None,
    slot: int = NO_SLOT,
    first_block: int = 1,
    scored: bool = False,
) -> Chunk:
    """Of a prompt of `total` tokens (as many as the chunk reaches, if not given) in blocks counted downwards."""
    total = total or start + length
    prompt = tuple(100 + i for i in range(total))
    made = TokenSequence.of(request(prompt, prompt_logprobs=0 if scored else None), NO_SINK)
    made.num_computed, made.slot = start, slot
    count = -(-total // BLOCK)
    made.blocks = list(range(first_block + count - 1, first_block - 1, -1))
    return Chunk(made, start, length)


def test_one_token_chunks_come_first_and_each_token_goes_to_its_place() -> None:
    long, short = chunk(14, 4, first_block=5), chunk(17, 1, first_block=8)
    batch = build_batch([long, short], BLOCK, CPU)
    assert batch.chunks == (short, long)
    assert batch.token_ids.tolist() == [117, 114, 115, 116, 117]
    assert batch.positions.tolist() == [17, 14, 15, 16, 17]
    assert batch.kv_slots.tolist() == [8 * BLOCK + 1, 6 * BLOCK + 14, 6 * BLOCK + 15, 5 * BLOCK, 5 * BLOCK + 1]


def test_logits_are_wanted_where_a_sequence_is_complete_or_its_prompt_is_scored() -> None:
    unfinished = chunk(0, 5, total=9)
    complete = chunk(4, 3)
    scored = chunk(0, 4, total=9, scored=True)
    batch = build_batch([unfinished, complete, scored], BLOCK, CPU)
    assert batch.logit_rows.tolist() == [7, 8, 9, 10, 11]
    assert [len(wanted_rows(one, 0)) for one in (unfinished, complete, scored)] == [0, 1, 4]


def test_a_scored_prompt_that_was_preempted_after_its_first_token_wants_the_last_row_only() -> None:
    again = chunk(0, 6, scored=True)
    again.sequence.num_prompt = 5  # the sixth token was sampled
    assert list(wanted_rows(again, 10)) == [15]


def test_the_batch_is_filled_up_with_rows_that_write_to_the_trash_block() -> None:
    batch = build_batch([chunk(0, 3, slot=4)], BLOCK, CPU, row_multiple=8)
    assert batch.token_ids.tolist() == [100, 101, 102, 0, 0, 0, 0, 0]
    assert batch.kv_slots.tolist()[3:] == [TRASH_BLOCK * BLOCK] * 5
    assert batch.slots is not None
    assert batch.slots.tolist() == [4, 4, 4, *[NO_SLOT] * 5]
    assert batch.logit_rows.tolist() == [2]
    assert build_batch([chunk(0, 8)], BLOCK, CPU, row_multiple=8).token_ids.shape == (8,)


def test_rows_without_adapters_have_no_slots() -> None:
    assert build_batch([chunk(0, 3)], BLOCK, CPU).slots is None


Chunks = st.builds(
    lambda start, length, rest, slot: (start, length, start + length + rest, slot),
    st.integers(0, 70),
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(NO_SLOT, 3),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(Chunks, min_size=1, max_size=8))
def test_any_chunks_are_laid_out_whole(made: list[tuple[int, int, int, int]]) -> None:
    chunks = [
        chunk(start, length, total=total, slot=slot, first_block=1 + 10 * number)
        for number, (start, length, total, slot) in enumerate(made)
    ]
    batch = build_batch(chunks, BLOCK, CPU)
    assert sorted(map(id, batch.chunks)) == sorted(map(id, chunks))
    assert_rows(batch)
    assert (set() if batch.fresh_blocks is None else set(batch.fresh_blocks.tolist())) == fresh(chunks)


def assert_rows(batch: StepBatch) -> None:
    row = 0
    for one in batch.chunks:
        for position in range(one.start, one.end):
            block, offset = divmod(int(batch.kv_slots[row]), BLOCK)
            assert (block, offset) == (one.sequence.blocks[position // BLOCK], position % BLOCK)
            assert int(batch.positions[row]) == position
            assert int(batch.token_ids[row]) == one.sequence.token_ids[position]
            assert one.sequence.slot == (NO_SLOT if batch.slots is None else int(batch.slots[row]))
            row += 1
    assert row == batch.token_ids.shape[0]


def fresh(chunks: Sequence[Chunk]) -> set[int]:
    """Blocks whose first token is in a chunk and whose last is not."""
    found = set()
    for one in chunks:
        for index, block in enumerate(one.sequence.blocks):
            if one.start <= index * BLOCK < one.end < (index + 1) * BLOCK:
                found.add(block)
    return found
