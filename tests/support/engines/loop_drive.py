"""A loop that is stepped by hand, and its runner: logits are a hash of the text, and it fails where it is told to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from engines.interface.errors import EngineStopped
from engines.interface.protocol import GenerateRequest, TokenDelta
from engines.loop import EngineLoop, Event
from engines.planning.block_pool import BlockPool
from engines.planning.scheduler import Chunk, Scheduler
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.sampling.sampler import Draws, Sampler
from engines.tensors.batch import Carried, StepBatch, build_batch, wanted_rows
from tests.support.engines.no_adapters import NoAdapters

VOCAB = 50
RAISES, NAN, MISSHAPEN, BREAKS = 41, 42, 43, 44
"""Tokens of the prompt at which the runner raises, gives NaN, gives no logits, and breaks for good."""


def logits_after(token_ids: Sequence[int]) -> list[float]:
    rng = Random(repr(list(token_ids)))
    return [rng.gauss(0, 2) if token_id < 40 else -30.0 for token_id in range(VOCAB)]


@dataclass
class HashRunner:
    """`overlaps`: decodes without waiting for the tokens before. `spoils`: after this token nothing is finite.
    `refuses`: which calls of `decode` raise, counted from 0.
    """

    overlaps: bool = False
    repeatable: bool = True
    broken: bool = False
    spoils: int | None = None
    refuses: set[int] = field(default_factory=set)
    batches: list[list[int]] = field(default_factory=list)
    decodes: list[int | None] = field(default_factory=list)
    """Calls of `decode`: rows whose tokens were carried, None where none were."""
    _logits: torch.Tensor = field(default_factory=lambda: torch.zeros(64, VOCAB))

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        if not self.overlaps:
            return None
        self.decodes.append(None if carried is None else len(chunks))
        if len(self.decodes) - 1 in self.refuses:
            raise RuntimeError("the device said no, this time")
        if carried is None:
            batch, logits = self.forward(chunks)
            return batch, self._for_now(logits)
        rows = []
        for chunk, row in zip(chunks, carried.rows, strict=True):
            known = chunk.sequence.token_ids
            assert len(known) == chunk.start, "what is carried is what nobody knows yet"
            rows.append(self._logits_after([*known, int(carried.token_ids[row])]))
        self.batches.append([1] * len(chunks))
        nothing = torch.zeros(0, dtype=torch.int64)
        batch = StepBatch(tuple(chunks), nothing, nothing, nothing, None, nothing, None)
        return batch, self._for_now(torch.tensor(rows))

    def _for_now(self, logits: torch.Tensor) -> torch.Tensor:
        """What a recorded step gives is written over by the next."""
        self._logits[: logits.shape[0]] = logits
        return self._logits[: logits.shape[0]]

    def forward(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        self.batches.append([chunk.length for chunk in chunks])
        known = {token_id for chunk in chunks for token_id in chunk.sequence.token_ids}
        self.broken = self.broken or BREAKS in known
        if self.broken or RAISES in known:
            raise RuntimeError("the device said no")
        batch = build_batch(chunks, 16, torch.device("cpu"))
        rows = [
            self._logits_after(chunk.sequence.token_ids[: chunk.start + row + 1])
            for chunk in batch.chunks
            for row in wanted_rows(chunk, 0)
        ]
        logits = torch.tensor(rows).view(len(rows), VOCAB)
        at = 0
        for chunk in batch.chunks:
            if NAN in chunk.sequence.token_ids:
                logits[at : at + len(wanted_rows(chunk, 0)), 3] = float("nan")
            at += len(wanted_rows(chunk, 0))
        return batch, logits[:0] if MISSHAPEN in known else logits

    def _logits_after(self, known: Sequence[int]) -> list[float]:
        return [float("nan")] * VOCAB if known[-1] == self.spoils else logits_after(known)

    def check_health(self) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")


@dataclass
class Bench:
    """A loop that is stepped by the test."""

    runner: HashRunner = field(default_factory=HashRunner)
    num_blocks: int = 100
    sampler: Sampler = Draws
    emitted: list[list[tuple[str, Event]]] = field(default_factory=list)
    ended: list[EngineStopped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, 16)
        budgets = {"max_running": 8, "max_step_tokens": 64, "max_step_tokens_decoding": 32}
        self.scheduler = Scheduler(self.pool, NoAdapters(), **budgets, prefix_cache=True)

        def emit(events: Sequence[tuple[TokenSequence, Event]]) -> None:
            self.emitted.append([(sequence.request_id, event) for sequence, event in events])

        self.loop = EngineLoop(self.runner, self.scheduler, NoAdapters(), emit, self.ended.append, sampler=self.sampler)

    def add(self, *requests: GenerateRequest) -> None:
        for made in requests:
            self.loop.add(TokenSequence.of(made, NO_SINK))

    def finish(self) -> None:
        with torch.inference_mode():
            while self.loop.step():
                pass

    def events(self, made: GenerateRequest) -> list[Event]:
        return [event for events in self.emitted for request_id, event in events if request_id == made.request_id]

    def deltas(self, made: GenerateRequest) -> list[TokenDelta]:
        found = self.events(made)
        assert all(isinstance(event, TokenDelta) for event in found)
        return [event for event in found if isinstance(event, TokenDelta)]

    def tokens(self, made: GenerateRequest) -> list[int]:
        return [token_id for delta in self.deltas(made) for token_id in delta.token_ids]

    def assert_clean(self) -> None:
        assert self.scheduler.is_idle
        assert self.pool.num_free == self.num_blocks - 1


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    known = list(prompt)
    for _ in range(count):
        row = logits_after(known)
        known.append(row.index(max(row)))
    return known[len(prompt) :]
