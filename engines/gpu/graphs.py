"""Decode steps as CUDA graphs: one for each bucket of rows, with and without adapters.

A graph replays the same kernels on the same addresses. So a step's inputs are copied into one static matrix. It is
filled up to the bucket with rows that write to the trash block. A step then costs the host that copy and one launch.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engines.gpu.attention import PagedLayout
from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.planning.sequence import NO_SLOT
from engines.tensors.batch import Carried, StepBatch

logger = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_COLUMNS = 5  # token id, position, place in the KV cache, length with this token, adapter slot

Forward = Callable[[StepBatch, PagedLayout], torch.Tensor]
"""Logits [rows, vocab] of a batch of one-token rows."""

Run = Callable[[], object]


class Capture(Protocol):
    def __call__(self, compute: Run) -> Run:
        """Returns a call that repeats what `compute` did, on the content of its inputs at that time."""


class CudaCapture:
    """Graphs that share their memory, since only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps a workspace for each stream that it was used on.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Run) -> Run:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # kernels are compiled and libraries set up before they are recorded
                    compute()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                compute()
        finally:
            torch.cuda.set_stream(before)  # which a capture that fails leaves undone
        before.wait_stream(self._stream)
        return graph.replay


def repeat(compute: Run) -> Run:
    """A `Capture` for devices without graphs: it computes everything each time."""
    return compute


class _StaticRows:
    """The matrix that graphs read [rows, _COLUMNS + width] int32, and what the host last wrote there."""

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(rows, _COLUMNS + width, dtype=torch.int32, device=device)
        self._on_host = torch.zeros(rows, _COLUMNS + width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._numpy = self._on_host.numpy()
        self._block_size = block_size
        self._tables: list[tuple[list[int] | None, int]] = [(None, 0)] * rows
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, chunks: Sequence[Chunk], bucket: int, carried: Carried | None = None) -> None:
        """Rows of the chunks, one token each, then rows that write to the trash block."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before this one may still be reading
        size, numpy = self._block_size, self._numpy
        rows = []
        for row, chunk in enumerate(chunks):
            sequence, at = chunk.sequence, chunk.start
            blocks = sequence.blocks
            first = sequence.token_ids[at] if carried is None else carried.rows[row]
            rows.append((first, at, blocks[at // size] * size + at % size, at + 1, sequence.slot))
            self._write_table(row, blocks, at // size + 1)
        if rows:
            numpy[: len(rows), :_COLUMNS] = rows
        for row in range(len(chunks), bucket):
            numpy[row, : _COLUMNS + 1] = 0, 0, TRASH_BLOCK * size, 1, NO_SLOT, TRASH_BLOCK
            self._tables[row] = None, 0
        # Whole rows: anything else would not be one piece of memory, and be copied through others.
        self.on_device[:bucket].copy_(self._on_host[:bucket], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if carried is not None:
            first_tokens = self.on_device[: len(chunks), 0]
            first_tokens.copy_(carried.token_ids.index_select(0, first_tokens))

    def _write_table(self, row: int, blocks: list[int], count: int) -> None:
        """Writes only what is new. A sequence's list of blocks grows, and is replaced after a preemption."""
        known, written = self._tables[row]
        start = written if known is blocks and written <= count else 0
        if start < count:
            self._numpy[row, _COLUMNS + start : _COLUMNS + count] = blocks[start:count]
            self._tables[row] = blocks, count


class DecodeGraphs:
    def __init__(
        self,
        forward: Forward,
        capture: Capture,
        *,
        block_size: int,
        width: int,
        max_rows: int,
        device: torch.device,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        """`width`: blocks of the longest sequence. `buckets`: for how many rows there is a graph, in ascending order,
        as far as they are needed for `max_rows`.
        """
        self._forward = forward
        self._capture = capture
        largest = next((bucket for bucket in buckets if bucket >= max_rows), buckets[-1])
        self._buckets = [bucket for bucket in buckets if bucket <= largest]
        self._rows = _StaticRows(largest, width, block_size, device)
        self._numbers = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._zeros = torch.zeros_like(self._numbers)
        self._logits: torch.Tensor | None = None
        self._graphs: dict[tuple[int, bool], tuple[StepBatch, Run]] = {}

    def capture_all(self) -> None:
        """Largest first: the smaller ones then find all the memory that they need in the pool."""
        for bucket in reversed(self._buckets):
            for has_adapters in (False, True):
                self._rows.fill([], bucket)
                self._graph(bucket, has_adapters)
        logger.info("%d CUDA graphs for 1 to %d rows", len(self._graphs), self._buckets[-1])

    def run(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """The batch, and logits [rows, vocab] that are valid until the next call. None for more rows than there is a
        graph for. Does not wait for the device.

        `chunks` are one token each. `carried` has the tokens that the host does not know.
        """
        bucket = next((bucket for bucket in self._buckets if bucket >= len(chunks)), None)
        if bucket is None:
            return None
        self._rows.fill(chunks, bucket, carried)
        batch, replay = self._graph(bucket, any(chunk.sequence.slot != NO_SLOT for chunk in chunks))
        replay()
        assert self._logits is not None
        return replace(batch, chunks=tuple(chunks)), self._logits[: len(chunks)]

    def _graph(self, bucket: int, has_adapters: bool) -> tuple[StepBatch, Run]:
        key = bucket, has_adapters
        if key not in self._graphs:
            inputs = self._rows.on_device[:bucket]
            batch = StepBatch(
                chunks=(),
                token_ids=inputs[:, 0],
                positions=inputs[:, 1],
                kv_slots=inputs[:, 2],
                fresh_blocks=None,
                logit_rows=self._numbers[:bucket].long(),
                slots=inputs[:, 4] if has_adapters else None,
            )
            self._graphs[key] = batch, self._capture(lambda: self._compute(batch, inputs))
        return self._graphs[key]

    def _compute(self, batch: StepBatch, inputs: torch.Tensor) -> None:
        """Everything that is read lives as long as this object, since a graph stores only addresses."""
        bucket = inputs.shape[0]
        now = replace(
            batch,
            token_ids=batch.token_ids.long(),
            positions=batch.positions.long(),
            kv_slots=batch.kv_slots.long(),
            slots=None if batch.slots is None else batch.slots.contiguous(),
        )
        queries = {1: (self._numbers[:bucket], self._zeros[:bucket])}
        layout = PagedLayout(
            self._numbers[: bucket + 1],
            inputs[:, 3].contiguous(),
            inputs[:, _COLUMNS:],
            (1,) * bucket,
            _queries=queries,
        )
        logits = self._forward(now, layout)
        if self._logits is None:
            self._logits = logits.new_empty(self._rows.on_device.shape[0], logits.shape[1])
        self._logits[:bucket].copy_(logits)
