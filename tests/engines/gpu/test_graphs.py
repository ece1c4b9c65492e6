"""What a recorded decode step reads is what its sequences are now, whatever was in its rows before."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.gpu.attention import PagedLayout
from engines.gpu.graphs import CudaCapture, DecodeGraphs, repeat
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, NO_SLOT, TokenSequence
from engines.tensors.batch import Carried, StepBatch
from tests.support.engines.engine_harness import DEVICE, request

BLOCK, WIDTH = 16, 6


def read(batch: StepBatch, layout: PagedLayout) -> torch.Tensor:
    """Everything that a forward reads, in place of logits [rows, 6 + WIDTH]; of a table what is within the length."""
    rows = batch.token_ids.shape[0]
    slots = batch.slots if batch.slots is not None else torch.full_like(layout.kv_lens, NO_SLOT)
    places = torch.arange(WIDTH, device=layout.kv_lens.device)
    held = (layout.kv_lens + BLOCK - 1) // BLOCK
    sequences, first = layout.queries(1)
    columns = [batch.token_ids, batch.positions, batch.kv_slots, layout.kv_lens, slots, sequences + first]
    tables = layout.block_tables * (places < held[:, None])
    assert layout.row_starts.shape[0] == rows + 1
    return torch.cat([torch.stack([column.long() for column in columns], dim=1), tables.long()], dim=1)


def expected(chunks: list[Chunk]) -> list[list[int]]:
    rows = []
    for number, chunk in enumerate(chunks):
        sequence, at = chunk.sequence, chunk.start
        held = sequence.blocks[: at // BLOCK + 1]
        place = held[-1] * BLOCK + at % BLOCK
        rows.append(
            [sequence.token_ids[at], at, place, at + 1, sequence.slot, number, *held, *[0] * (WIDTH - len(held))]
        )
    return rows


def decoding(rng: Random, length: int) -> TokenSequence:
    sequence = TokenSequence.of(request([rng.randrange(300) for _ in range(length)]), NO_SINK)
    sequence.blocks = [rng.randrange(1, 99) for _ in range(-(-length // BLOCK))]
    sequence.slot = rng.choice([NO_SLOT, 0, 5])
    return sequence


def carry(rng: Random, chunks: list[Chunk]) -> Carried:
    """Takes the last token from each sequence; it is on the device alone then."""
    places = sorted(rng.sample(range(20), len(chunks)))
    token_ids = torch.full((20,), -1, dtype=torch.int64, device=DEVICE)
    for chunk, place in zip(chunks, places, strict=True):
        token_ids[place] = chunk.sequence.token_ids.pop()
    return Carried(token_ids, tuple(places))


@pytest.mark.parametrize("max_rows", [1, 3, 16])
@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_a_step_reads_its_own_sequences(max_rows: int, seed: int) -> None:
    rng = Random(seed)
    graphs = DecodeGraphs(read, repeat, block_size=BLOCK, width=WIDTH, max_rows=max_rows, device=DEVICE)
    running: list[TokenSequence] = []
    for _ in range(12):
        while len(running) < max_rows and rng.random() < 0.7:
            running.append(decoding(rng, rng.randrange(1, WIDTH * BLOCK - 12)))
        for sequence in list(running):
            if rng.random() < 0.2:
                running.remove(sequence)
            elif rng.random() < 0.2:  # preempted, and back in other blocks
                sequence.blocks = [rng.randrange(1, 99) for _ in sequence.blocks]
        rng.shuffle(running)
        if running:
            decode(graphs, rng, running)
        for sequence in running:
            sequence.append(rng.randrange(300))
            if len(sequence.token_ids) > len(sequence.blocks) * BLOCK:
                sequence.blocks.append(rng.randrange(1, 99))


def decode(graphs: DecodeGraphs, rng: Random, running: list[TokenSequence]) -> None:
    """A step in which the last tokens are on the host, and one in which they are not, or only one of these."""
    chunks = [Chunk(sequence, len(sequence.token_ids) - 1, 1) for sequence in running]
    rows = expected(chunks)
    for is_carried in rng.choice([(False,), (True,), (False, True)]):
        carried = carry(rng, chunks) if is_carried else None
        batch, found = graphs.run(chunks, carried) or pytest.fail("there is a graph for that many")
        assert batch.chunks == tuple(chunks)
        assert found.tolist() == rows
    for sequence, (token_id, *_) in zip(running, rows, strict=True):
        if is_carried:
            sequence.append(token_id)


@pytest.mark.gpu
def test_graphs_recorded_on_a_device_read_the_same() -> None:
    rng = Random(0)
    graphs = DecodeGraphs(read, CudaCapture(), block_size=BLOCK, width=WIDTH, max_rows=16, device=DEVICE)
    graphs.capture_all()
    for count in (1, 2, 16, 3, 16, 1):
        torch.randn(1 << 20, device=DEVICE)  # whatever was let go is taken by others
        chunks = [Chunk(one, len(one.token_ids) - 1, 1) for one in (decoding(rng, 50) for _ in range(count))]
        rows = expected(chunks)
        for carried in (None, carry(rng, chunks)):
            _, found = graphs.run(chunks, carried) or pytest.fail("there is a graph for that many")
            assert found.tolist() == rows
