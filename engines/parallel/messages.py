"""The commands of a group's leading process to the others. All processes run each command at the same time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.interface.protocol import GenerateRequest, HostTensor, PromptImage, SamplingParams
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SINK, TokenSequence
from engines.tensors.batch import ImageRows


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """What is needed to compute a chunk."""

    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    slot: int
    completes: bool
    scores_prompt: bool
    images: tuple[tuple[int, int], ...]
    """First place and number of tokens of each."""

    @classmethod
    def of(cls, chunk: Chunk, block_size: int) -> "ChunkMessage":
        sequence = chunk.sequence
        return cls(
            chunk.start,
            tuple(sequence.token_ids[chunk.start : chunk.end]),
            tuple(chunk.block_table(block_size)),
            sequence.slot,
            chunk.completes,
            sequence.scores_prompt,
            tuple((image.start, image.length) for image in sequence.request.images),
        )

    def chunk(self, number: int) -> Chunk:
        """Equal to the leader's in everything that a forward reads. Tokens before and behind it are placeholders."""
        sampling = SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0 if self.scores_prompt else None)
        tokens: Any = _Tokens(self.start, self.token_ids, 0 if self.completes else 1)
        images = tuple(PromptImage(start, length, "", {}) for start, length in self.images)
        request = GenerateRequest(str(number), (), sampling, images=images)
        sequence = TokenSequence(request, NO_SINK, tokens, len(tokens))
        sequence.blocks = list(self.blocks)
        sequence.slot = self.slot
        return Chunk(sequence, self.start, len(self.token_ids))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A sequence's tokens, of which only some are known. The others are never built."""

    start: int
    known: tuple[int, ...]
    after: int

    def __len__(self) -> int:
        return self.start + len(self.known) + self.after

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            assert place.start >= self.start, "that far back nothing is known"
            return self.known[place.start - self.start : place.stop - self.start]
        return self.known[place - self.start]


@dataclass(frozen=True, slots=True)
class Encode:
    """All processes run the model up to its language model, whose embedding is split. The leader keeps the features."""

    token_ids: tuple[int, ...]
    tensors: Mapping[str, HostTensor]


@dataclass(frozen=True, slots=True)
class Forward:
    """`images`: what the leader has encoded, on the host."""

    chunks: tuple[ChunkMessage, ...]
    images: ImageRows | None


@dataclass(frozen=True, slots=True)
class CheckHealth:
    pass


@dataclass(frozen=True, slots=True)
class Install:
    """A pickled `AdapterWeights`, whole: every process takes its part."""

    slot: int
    weights: bytes


@dataclass(frozen=True, slots=True)
class Remove:
    slot: int


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Message = Encode | Forward | CheckHealth | Install | Remove | Stop
