"""One forward pass over a ragged batch: tokens of many sequences, flattened into one row of `T` tokens."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from engines.block_pool import TRASH_BLOCK
from engines.scheduler import Chunk
from engines.sequence import NO_SLOT


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one sequence in the batch: rows `start` … `start` + `length` - 1.

    `kv_len` counts the sequence's tokens once these are computed, `block_table` [blocks] int64 says where they lie.
    """

    start: int
    length: int
    kv_len: int
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows 0 … n-1, one token each. `block_tables` [n, width] int64 ends in trash blocks, `kv_lens` [n] int64."""

    block_tables: torch.Tensor
    kv_lens: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows that one adapter slot applies to."""

    slot: int
    rows: torch.Tensor  # [rows] int64


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`token_ids`, `positions`, `kv_slots` (block * block_size + offset) [T] int64; decode rows come first, rows that
    only fill the batch up come last.

    `fresh_blocks`: blocks that get their first token now and are not full afterwards; what else lies in them is left
    from another sequence. `logit_rows` [R] int64: the rows whose logits are wanted. `slots`: adapter slot of each row,
    -1 for none; the same by adapter in `adapter_rows`, and for the wanted rows (numbered 0 … R-1) in
    `head_adapter_rows`.
    """

    chunks: tuple[Chunk, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_slots: torch.Tensor
    fresh_blocks: torch.Tensor | None
    decode: DecodeRows | None
    spans: tuple[Span, ...]
    logit_rows: torch.Tensor
    slots: torch.Tensor | None
    adapter_rows: tuple[AdapterRows, ...]
    head_adapter_rows: tuple[AdapterRows, ...]


def build_batch(
    chunks: SequenceOf[Chunk], block_size: int, device: torch.device, *, row_multiple: int = 1
) -> StepBatch:
    """Lay the chunks out, one-token ones first. Logits are wanted after every chunk that completes its sequence, and
    for all rows of a sequence whose prompt log-probabilities are asked for. The rows are filled up to a multiple of
    `row_multiple` with rows that write to the trash block.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk.length != 1)
    num_decode = sum(chunk.length == 1 for chunk in ordered)
    token_ids: list[int] = []
    positions: list[int] = []
    kv_slots: list[int] = []
    slots: list[int] = []
    spans: list[Span] = []
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
        if chunk.length > 1:
            table = torch.tensor(blocks[: -(-chunk.end // block_size)], dtype=torch.int64, device=device)
            spans.append(Span(row, chunk.length, chunk.end, table))
        wanted += wanted_rows(chunk, row)
    filler = -len(token_ids) % row_multiple
    token_ids += [0] * filler
    positions += [0] * filler
    kv_slots += [TRASH_BLOCK * block_size] * filler
    slots += [NO_SLOT] * filler
    return StepBatch(
        chunks=tuple(ordered),
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        kv_slots=torch.tensor(kv_slots, dtype=torch.int64, device=device),
        fresh_blocks=torch.tensor(fresh, dtype=torch.int64, device=device) if fresh else None,
        decode=_decode_rows(ordered[:num_decode], block_size, device),
        spans=tuple(spans),
        logit_rows=torch.tensor(wanted, dtype=torch.int64, device=device),
        slots=torch.tensor(slots, dtype=torch.int32, device=device) if any(s != NO_SLOT for s in slots) else None,
        adapter_rows=_by_adapter(slots, device),
        head_adapter_rows=_by_adapter([slots[row] for row in wanted], device),
    )


def wanted_rows(chunk: Chunk, row: int) -> range:
    """The rows of a chunk that begins at `row` whose logits are wanted."""
    last = row + chunk.length - 1
    scores_prompt = chunk.sequence.request.sampling.prompt_logprobs is not None and not chunk.sequence.num_output
    if scores_prompt:
        return range(row, last + 1)
    return range(last, last + 1) if chunk.completes else range(0)


def _decode_rows(chunks: SequenceOf[Chunk], block_size: int, device: torch.device) -> DecodeRows | None:
    if not chunks:
        return None
    width = max(-(-chunk.end // block_size) for chunk in chunks)
    tables = []
    for chunk in chunks:
        blocks = chunk.sequence.blocks[:width]
        tables.append(blocks + [TRASH_BLOCK] * (width - len(blocks)))
    return DecodeRows(
        block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
        kv_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int64, device=device),
    )


def _by_adapter(slots: SequenceOf[int], device: torch.device) -> tuple[AdapterRows, ...]:
    rows: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot != NO_SLOT:
            rows.setdefault(slot, []).append(row)
    return tuple(
        AdapterRows(slot, torch.tensor(members, dtype=torch.int64, device=device)) for slot, members in rows.items()
    )
