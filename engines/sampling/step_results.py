"""From the logits of a forward to the results of its chunks: the next tokens, and the scores of prompt tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engines.interface.protocol import TokenLogprob
from engines.planning.scheduler import Chunk
from engines.planning.sequence import TokenSequence
from engines.sampling.sampler import Draws, Sampled, Sampler, prompt_logprobs
from engines.tensors.batch import Carried, StepBatch, wanted_rows
from engines.tensors.transfer import rows_of

Rows = Sequence[tuple[Chunk, int, int]]
"""Chunks with their first and last row among the logits; last < first where a chunk has none."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The next token, if one is wanted, and the scores of prompt tokens, if wanted."""

    chunk: Chunk
    draw: Sampled | None
    scores: list[TokenLogprob | None]


class Outcomes:
    """The results of one forward, being computed. Only `collect` waits for the device, once. Changes no sequence, so
    the chunks can be run again after any exception.

    `drawn`: the chunks after which a token is drawn, in the order of the draws. `revised`: sequences whose tokens
    differ from those in `carried`, known once `collect` has run.
    """

    def __init__(self, rows: Rows, logits: torch.Tensor, sampler: Sampler = Draws) -> None:
        """Nothing may write to `logits` [wanted rows, vocab] before `collect`."""
        self._rows = rows
        self._logits = logits
        sampled = [(chunk, last) for chunk, _, last in rows if chunk.completes and _samples(chunk)]
        self.drawn = [chunk for chunk, _ in sampled]
        self._draws: Draws | None = None
        if sampled:
            own = rows_of(logits, [last for _, last in sampled])
            self._draws = sampler(own, [chunk.sequence for chunk in self.drawn])
        self.revised: list[TokenSequence] = []

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for chunk, _, _ in self._rows]

    def carried(self, places: Sequence[int]) -> Carried:
        """The tokens drawn at these places of `drawn`."""
        assert self._draws is not None
        return Carried(self._draws.token_ids, tuple(places))

    def collect(self) -> list[StepResult]:
        draws: dict[str, Sampled] = {}
        if self._draws is not None:
            for chunk, draw in zip(self.drawn, self._draws.collect(), strict=True):
                draws[chunk.sequence.request_id] = draw
            self.revised = [self.drawn[row].sequence for row in self._draws.revised]
        outcomes = [
            StepResult(chunk, draws.get(chunk.sequence.request_id), _score_prompt(chunk, self._logits, first))
            for chunk, first, _ in self._rows
        ]
        # Frees rows over the vocabulary: the next draws need as much memory while the loop still holds this object.
        self._draws, self._logits = None, self._logits.new_empty(0)
        return outcomes


def rows_of_chunks(batch: StepBatch) -> Rows:
    """Where the wanted logits of a batch belong."""
    rows: list[tuple[Chunk, int, int]] = []
    at = 0
    for chunk in batch.chunks:
        count = len(wanted_rows(chunk, 0))
        rows.append((chunk, at, at + count - 1))
        at += count
    return rows


def _samples(chunk: Chunk) -> bool:
    return chunk.sequence.request.sampling.max_tokens > 0


def _score_prompt(chunk: Chunk, logits: torch.Tensor, first: int) -> list[TokenLogprob | None]:
    """Log-probabilities of the prompt tokens after the chunk's tokens. Not again after a preemption."""
    sequence, sampling = chunk.sequence, chunk.sequence.request.sampling
    if sampling.prompt_logprobs is None or sequence.num_output or sequence.delivered:
        return []
    # The first token is predicted by nothing.
    scores: list[TokenLogprob | None] = [] if sequence.prompt_logprobs else [None]
    start = max(0, len(sequence.prompt_logprobs) - 1)  # the row that predicts the first token not scored yet
    targets = sequence.token_ids[start + 1 : min(chunk.end + 1, sequence.num_prompt)]
    if targets:
        offset = first + start - chunk.start
        scores += prompt_logprobs(logits[offset : offset + len(targets)], targets, sampling)
    return scores
