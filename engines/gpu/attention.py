"""Attention by Triton kernels that read the blocks where they lie."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from triton import knobs, next_power_of_2

from engines.attention.interface import Attention
from engines.gpu.kernels import attend_kernel, merge_kernel
from engines.planning.scheduler import Chunk
from engines.tensors.batch import StepBatch, block_tables
from engines.tensors.kv_cache import KVCache
from engines.tensors.transfer import to_device

_MAX_SPLITS = 16
_KEYS_PER_SPLIT = 64


@dataclass(slots=True)
class PagedLayout:
    """Where the queries and keys of a batch of n sequences lie, in int32: `row_starts` [n + 1], `kv_lens` [n] with the
    new tokens, `block_tables` [n, width]. On the host: `lengths`, how many new tokens each sequence has; `ends`, the
    same as `kv_lens`, unless all have one new token.
    """

    row_starts: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor
    lengths: tuple[int, ...]
    ends: tuple[int, ...] = ()
    _queries: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Sequence[Chunk], block_size: int, device: torch.device) -> "PagedLayout":
        lengths, ends = tuple(chunk.length for chunk in chunks), tuple(chunk.end for chunk in chunks)
        return cls(
            to_device([0, *accumulate(lengths)], device, torch.int32),
            to_device(ends, device, torch.int32),
            to_device(block_tables(chunks, block_size), device, torch.int32),
            lengths,
            ends,
        )

    def queries(self, per_program: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequence and the first new token of each program that takes up to `per_program` of one sequence."""
        if per_program not in self._queries:
            device = self.kv_lens.device
            pairs = [(n, at) for n, length in enumerate(self.lengths) for at in range(0, length, per_program)]
            self._queries[per_program] = (
                to_device([sequence for sequence, _ in pairs], device, torch.int32),
                to_device([first for _, first in pairs], device, torch.int32),
            )
        return self._queries[per_program]


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1). It works on a CPU, slowly, for tests."""
    return bool(knobs.runtime.interpret)


class TritonBackend:
    """Implements `attention.interface.AttentionBackend`. `num_programs`: how many the device runs side by side.

    `reads_whole_blocks`: it also reads beyond a sequence's length, where the content of an earlier owner must not be.
    """

    reads_whole_blocks = False

    def __init__(self, cache: KVCache, *, num_programs: int) -> None:
        self._cache = cache
        self._num_programs = num_programs
        self._batch: StepBatch | None = None
        self._layout: PagedLayout | None = None

    def use(self, batch: StepBatch, layout: PagedLayout) -> None:
        """The layout of a batch that is not made of chunks."""
        self._batch, self._layout = batch, layout

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: Attention, batch: StepBatch
    ) -> torch.Tensor:
        self._cache.write(
            attention.layer, k, v, batch.kv_slots, batch.fresh_blocks if self.reads_whole_blocks else None
        )
        layout = self._layout
        if layout is None or self._batch is not batch:
            layout = PagedLayout.of(batch.chunks, self._cache.block_size, q.device)
            self.use(batch, layout)
        keys, values = self._cache.k[attention.layer], self._cache.v[attention.layer]
        return self.compute(q, keys, values, attention, layout)

    def compute(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, attention: Attention, layout: PagedLayout
    ) -> torch.Tensor:
        return attend(q, keys, values, attention, layout, num_programs=self._num_programs)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention: Attention,
    layout: PagedLayout,
    *,
    num_programs: int,
) -> torch.Tensor:
    """q [T, heads, k_dim], keys [blocks, block_size, kv_heads, k_dim], values [blocks, block_size, kv_heads, v_dim]
    -> [T, heads, v_dim]
    """
    rows, heads, k_dim = q.shape
    block_size, kv_heads, v_dim = values.shape[1:]
    if q.stride(-1) != 1:
        q = q.contiguous()
    group = heads // kv_heads
    is_decode = max(layout.lengths) == 1
    k_pad, v_pad = max(16, next_power_of_2(k_dim)), max(16, next_power_of_2(v_dim))
    tiles = _Tiles.of(q.dtype, max(k_pad, v_pad), is_decode=is_decode)
    block_m = max(tiles.rows, next_power_of_2(group))
    per_program = 1 if is_decode else block_m // group
    sequence, first = layout.queries(per_program)
    programs = sequence.shape[0]
    splits = _splits(programs * kv_heads, num_programs, layout.block_tables.shape[1] * block_size)
    out = q.new_empty(rows, heads, v_dim)
    scratch = _scratch(splits * rows * heads if splits > 1 else 0, v_dim, q.device)
    sinks = attention.sinks if attention.sinks is not None else scratch[0]
    attend_kernel[(programs, kv_heads, splits)](
        q,
        keys,
        values,
        out,
        *scratch,
        sequence,
        first,
        layout.row_starts,
        layout.kv_lens,
        layout.block_tables,
        sinks,
        attention.scale,
        attention.softcap or 1.0,
        attention.window or 0,
        rows,
        q.stride(0),
        q.stride(1),
        keys.stride(1),
        keys.stride(2),
        values.stride(1),
        values.stride(2),
        layout.block_tables.stride(0),
        HEADS=heads,
        GROUP=group,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=k_pad,
        V_PAD=v_pad,
        BLOCK_SIZE=block_size,
        QUERIES=per_program,
        BLOCK_M=block_m,
        BLOCK_N=tiles.keys,
        SPLITS=splits,
        HAS_WINDOW=bool(attention.window),
        HAS_SOFTCAP=attention.softcap is not None,
        HAS_SINKS=attention.sinks is not None,
        num_warps=tiles.warps,
    )
    if splits > 1:
        merge_kernel[(rows, heads)](
            out,
            *scratch,
            sinks,
            rows,
            HEADS=heads,
            V_DIM=v_dim,
            V_PAD=v_pad,
            SPLITS=splits,
            HAS_SINKS=attention.sinks is not None,
        )
    return out


class _Tiles(NamedTuple):
    """What one program multiplies at a time: `rows` (its query tokens times the heads that share K and V) with `keys`.

    The sizes fit the registers and shared memory of every device since compute capability 8.0;
    `tests/engines/gpu/test_triton_compile.py` checks this. The minimum is 16 rows.
    """

    rows: int
    keys: int
    warps: int

    @classmethod
    def of(cls, dtype: torch.dtype, width: int, *, is_decode: bool) -> "_Tiles":
        if dtype == torch.float32:  # products of float32 are taken in registers
            return cls(16, 32, 8)
        keys = 64 if width <= 128 else 32
        return cls(16, keys, 4) if is_decode else cls(64, keys, 4 if width <= 128 else 8)


def _scratch(size: int, v_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Partial results of a split, for `size` rows: unscaled values [size * v_dim], and two numbers [size] each."""
    scratch = torch.empty(size * (v_dim + 2), dtype=torch.float32, device=device)
    return scratch[: size * v_dim], scratch[size * v_dim : size * (v_dim + 1)], scratch[size * (v_dim + 1) :]


def _splits(programs: int, num_programs: int, most_keys: int) -> int:
    """A power of two: enough to fill the device, and no more than there are tiles of keys."""
    wanted = min(num_programs // max(1, programs), most_keys // _KEYS_PER_SPLIT, _MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)
