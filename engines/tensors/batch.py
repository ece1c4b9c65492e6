"""One forward pass over a ragged batch: tokens of many sequences, flattened into one row of `T` tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SLOT
from engines.tensors.transfer import to_device

PROBE_TOKENS = 3
"""Rows of a batch by which a model is tried."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """What images put into a step of T rows.

    - `rows` [n]: rows, in rising order, that get `embeds` [n, hidden] in place of their embeddings.
    - `deepstack`: one [n, hidden] for each of the first layers, added to the layer's output in these rows.
    - `positions` [axes, T]: of all rows. None if one axis is enough: these are the batch's own.
    """

    rows: torch.Tensor
    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...]
    positions: torch.Tensor | None

    def to(self, device: torch.device) -> Self:
        positions = None if self.positions is None else self.positions.to(device)
        deepstack = tuple(layer.to(device) for layer in self.deepstack)
        return replace(
            self, rows=self.rows.to(device), embeds=self.embeds.to(device), deepstack=deepstack, positions=positions
        )

    def merged(self, embeds: torch.Tensor) -> torch.Tensor:
        """The embeddings [T, hidden] with those of the images in their rows."""
        if not self.rows.shape[0]:
            return embeds
        return embeds.index_copy(0, self.rows, self.embeds.to(embeds.dtype))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`token_ids`, `positions`, `kv_slots` (block * block_size + offset) [T] int64. Decode rows come first, padding
    rows last.

    - `fresh_blocks`: blocks that get their first token now and are not full afterwards. The rest of their content is
      from another sequence.
    - `logit_rows` [R] int64: the rows whose logits are wanted.
    - `slots` [T] int32: adapter slot of each row, -1 for none. None when no row has one.
    - `images`: None for a batch without images.
    """

    chunks: tuple[Chunk, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    fresh_blocks: torch.Tensor | None
    logit_rows: torch.Tensor
    slots: torch.Tensor | None
    images: ImageRows | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """First tokens of chunks that only the device knows yet: for chunk i the one at `rows[i]` of `token_ids` int64."""

    token_ids: torch.Tensor
    rows: tuple[int, ...]


def build_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device, *, row_multiple: int = 1) -> StepBatch:
    """Lay the chunks out, one-token ones first. Logits are wanted after every chunk that completes its sequence, and
    for all rows of a sequence with prompt log-probabilities. Padding rows, which write to the trash block, fill the
    batch up to a multiple of `row_multiple`.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.length != 1)
    token_ids: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    slots: list[int] = []
    fresh: list[int] = []
    wanted: list[int] = []
    for chunk in ordered:
        sequence, row = chunk.sequence, len(token_ids)
        token_ids += sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        blocks = sequence.blocks
        kv_slots += [blocks[p // block_size] * block_size + p % block_size for p in range(chunk.start, chunk.end)]
        slots += [sequence.slot] * chunk.length
        if chunk.end % block_size and chunk.start <= chunk.end - chunk.end % block_size:
            fresh.append(blocks[chunk.end // block_size])
        wanted += wanted_rows(chunk, row)
    filler = -len(token_ids) % row_multiple
    token_ids += [0] * filler
    positions += [0] * filler
    kv_slots += [TRASH_BLOCK * block_size] * filler
    slots += [NO_SLOT] * filler
    return StepBatch(
        chunks=tuple(ordered),
        token_ids=to_device(token_ids, device),
        positions=to_device(positions, device),
        kv_slots=to_device(kv_slots, device),
        fresh_blocks=to_device(fresh, device) if fresh else None,
        logit_rows=to_device(wanted, device),
        slots=to_device(slots, device, torch.int32) if any(s != NO_SLOT for s in slots) else None,
    )


def block_tables(chunks: Sequence[Chunk], block_size: int) -> list[list[int]]:
    """The block tables of the chunks, padded to the longest with the trash block."""
    tables = [chunk.block_table(block_size) for chunk in chunks]
    width = max(map(len, tables))
    return [table + [TRASH_BLOCK] * (width - len(table)) for table in tables]


def wanted_rows(chunk: Chunk, row: int) -> range:
    """The rows of a chunk that begins at `row` whose logits are wanted."""
    last = row + chunk.length - 1
    if chunk.sequence.scores_prompt:
        return range(row, last + 1)
    return range(last, last + 1) if chunk.completes else range(0)
