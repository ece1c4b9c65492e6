"""Decode steps as CUDA graphs: one for each bucket of rows, with and without adapters.

A graph replays the same kernels on the same addresses, so a step's inputs are copied into one static matrix, filled up
to the bucket with rows that write to the trash block. What a step costs on the host is then that copy and one launch.
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from engines.batch import StepBatch
from engines.block_pool import TRASH_BLOCK
from engines.gpu.attention import PagedLayout
from engines.scheduler import Chunk
from engines.sequence import NO_SLOT

logger = logging.getLogger(__name__)

_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_COLUMNS = 5  # token id, position, place in the KV cache, length with this token, adapter slot

Forward = Callable[[StepBatch, PagedLayout], torch.Tensor]
"""Logits [rows, vocab] of a batch of one-token rows."""

Compute = Callable[[], torch.Tensor]


class Capture(Protocol):
    def __call__(self, compute: Compute) -> Compute:
        """What `compute` did, to be done again on what its inputs hold then; its result may be overwritten by that."""


class CudaCapture:
    """Graphs that share their memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries set up before they are recorded
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()

        def run() -> torch.Tensor:
            graph.replay()
            return output

        return run


def repeat(compute: Compute) -> Compute:
    """A `Capture` for devices without graphs: everything is computed anew."""
    return compute


class DecodeGraphs:
    def __init__(
        self, forward: Forward, capture: Capture, *, block_size: int, width: int, max_rows: int, device: torch.device
    ) -> None:
        """`width`: blocks of the longest sequence."""
        self._forward = forward
        self._capture = capture
        self._block_size = block_size
        largest = next((bucket for bucket in _BUCKETS if bucket >= max_rows), _BUCKETS[-1])
        self._buckets = [bucket for bucket in _BUCKETS if bucket <= largest]
        self._inputs = torch.zeros(largest, _COLUMNS + width, dtype=torch.int32, device=device)
        self._host = torch.zeros(largest, _COLUMNS + width, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._graphs: dict[tuple[int, bool], tuple[StepBatch, Compute]] = {}

    def capture_all(self) -> None:
        """Largest first: the smaller ones then find all the memory they need in the pool."""
        for bucket in reversed(self._buckets):
            for has_adapters in (False, True):
                self._fill([], bucket, 1)
                self._graph(bucket, has_adapters)
        logger.info("%d CUDA graphs for 1 to %d rows", len(self._graphs), self._buckets[-1])

    def run(self, chunks: SequenceOf[Chunk]) -> tuple[StepBatch, torch.Tensor] | None:
        """The batch, and logits [rows, vocab] that hold until the next call; None for more rows than there is a graph
        for. `chunks` are one token each.
        """
        bucket = next((bucket for bucket in self._buckets if bucket >= len(chunks)), None)
        if bucket is None:
            return None
        width = max(-(-chunk.end // self._block_size) for chunk in chunks)
        self._fill(chunks, bucket, width)
        batch, compute = self._graph(bucket, any(chunk.sequence.slot != NO_SLOT for chunk in chunks))
        return replace(batch, chunks=tuple(chunks)), compute()[: len(chunks)]

    def _fill(self, chunks: SequenceOf[Chunk], bucket: int, width: int) -> None:
        size = self._block_size
        rows = np.zeros((bucket, _COLUMNS + width), np.int32)
        rows[:, 2:5] = TRASH_BLOCK * size, 1, NO_SLOT
        for row, chunk in zip(rows, chunks, strict=False):
            sequence, at = chunk.sequence, chunk.start
            table = sequence.blocks[: at // size + 1]
            row[:_COLUMNS] = sequence.token_ids[at], at, table[-1] * size + at % size, at + 1, sequence.slot
            row[_COLUMNS : _COLUMNS + len(table)] = table
        host = self._host[:bucket, : _COLUMNS + width]
        host.numpy()[:] = rows
        self._inputs[:bucket, : _COLUMNS + width].copy_(host, non_blocking=True)

    def _graph(self, bucket: int, has_adapters: bool) -> tuple[StepBatch, Compute]:
        key = bucket, has_adapters
        if key not in self._graphs:
            inputs = self._inputs[:bucket]
            rows = torch.arange(bucket, device=inputs.device)
            starts = torch.arange(bucket + 1, dtype=torch.int32, device=inputs.device)
            # Views of the static matrix: the numbers are read when the graph runs.
            batch = StepBatch(
                chunks=(),
                token_ids=inputs[:, 0],
                positions=inputs[:, 1],
                kv_slots=inputs[:, 2],
                fresh_blocks=None,
                logit_rows=rows,
                slots=inputs[:, 4] if has_adapters else None,
            )

            lengths = (1,) * bucket
            queries = {1: (starts[:-1], torch.zeros_like(starts[:-1]))}

            def compute() -> torch.Tensor:
                batch_now = replace(
                    batch,
                    token_ids=batch.token_ids.long(),
                    positions=batch.positions.long(),
                    kv_slots=batch.kv_slots.long(),
                    slots=None if batch.slots is None else batch.slots.contiguous(),
                )
                layout = PagedLayout(starts, inputs[:, 3].contiguous(), inputs[:, _COLUMNS:], lengths, queries)
                return self._forward(batch_now, layout)

            self._graphs[key] = batch, self._capture(compute)
        return self._graphs[key]
