"""How a model is computed with the Triton kernels, and what is done without where one of them does not work."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engines.attention.interface import AttentionBackend
from engines.config import EngineConfig
from engines.errors import ModelRefused
from engines.gpu.attention import PagedLayout, TritonBackend, is_interpreted
from engines.gpu.flashinfer import FlashInferBackend, wrappers_of
from engines.gpu.graphs import CudaCapture, DecodeGraphs, repeat
from engines.gpu.lora import RowAdapters, tiles_of
from engines.gpu.varlen import Flash, VarlenBackend
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch
from engines.tensors.kv_cache import KVCache

logger = logging.getLogger(__name__)

_INTERPRETED_PROGRAMS = 8
_PROGRAMS_PER_MULTIPROCESSOR = 2


def _backend_of(config: EngineConfig, device: torch.device) -> Callable[..., TritonBackend]:
    """Makes it of a `KVCache` and `num_programs`. Raises `ModelRefused` where the library that is asked for cannot be
    had.
    """
    if config.attention == "varlen":
        flash = Flash.of_torch(device)
        return lambda cache, **rest: VarlenBackend(cache, flash, **rest)
    if config.attention == "flashinfer":
        make_wrapper = wrappers_of(device)
        return lambda cache, **rest: FlashInferBackend(cache, make_wrapper, **rest)
    return TritonBackend


class GpuPath:
    """`compute`: logits [R, vocab] of a batch of one-token rows, with adapters row by row.

    `by_row`: whether adapters can go row by row, and so decode steps be recorded: not where layers get some of the rows
    only, or a part of the inputs.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, compute: Callable[[StepBatch], torch.Tensor], *, by_row: bool
    ) -> None:
        if device.type != "cuda" and not is_interpreted():
            raise ModelRefused(f"attention = {config.attention!r} needs a CUDA device, not {device}.")
        self._make_backend = _backend_of(config, device)
        self._config = config
        self._device = device
        self._compute = compute
        self._by_row = by_row
        self._has_graphs = by_row and config.cuda_graphs
        self._adapters: RowAdapters | None = None
        self._graphs: DecodeGraphs | None = None
        self._num_programs = _INTERPRETED_PROGRAMS
        if device.type == "cuda":
            count = torch.cuda.get_device_properties(device).multi_processor_count
            self._num_programs = count * _PROGRAMS_PER_MULTIPROCESSOR

    @property
    def is_demanded(self) -> bool:
        return self._config.attention != "auto"

    @property
    def overlaps(self) -> bool:
        return self._config.overlap

    def adapter_modules(self, *args: Any, **kwargs: Any) -> RowAdapters:
        """Arguments as of `AdapterModules`."""
        config = self._config
        self._adapters = RowAdapters(*args, **kwargs, num_slots=config.max_adapters, max_rank=config.max_adapter_rank)
        return self._adapters

    def allocate(self, cache: KVCache, context_length: int) -> AttentionBackend:
        """The backend over this cache, and graphs, which are recorded when they are first needed."""
        backend = self._make_backend(cache, num_programs=self._num_programs)

        def forward(batch: StepBatch, layout: PagedLayout) -> torch.Tensor:
            backend.use(batch, layout)
            return self._compute(batch)

        self._graphs = None
        if self._has_graphs:
            self._graphs = DecodeGraphs(
                forward,
                CudaCapture() if self._device.type == "cuda" else repeat,
                block_size=cache.block_size,
                width=-(-context_length // cache.block_size),
                max_rows=self._config.max_running,
                device=self._device,
            )
        return backend

    def record(self) -> None:
        """Record the graphs of all buckets now, so that no request has to wait for one. Before that, find out whether
        adapters work: the self-test has none.
        """
        assert self._adapters is not None
        try:
            if self._by_row:
                self._adapters.check()
        except Exception:  # whatever a compiler or a driver raises
            logger.warning("adapters are computed one by one, and without graphs", exc_info=True)
            self._by_row, self._graphs = False, None
        try:
            if self._graphs is not None:
                self._graphs.capture_all()
        except Exception:  # a model that looks at the device in between, or no memory left
            logger.warning("decode steps are not recorded as graphs", exc_info=True)
            self._graphs = None
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # another thread computes from here on

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """The batch, and logits [rows, vocab] that hold until the next call; None where there is no graph for it. Does
        not wait for the device.
        """
        if self._graphs is None or any(chunk.length != 1 for chunk in chunks) or not self.runs_by_row(chunks):
            return None
        return self._graphs.run(chunks, carried)

    def runs_by_row(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the adapters of these chunks change nothing but linear layers."""
        adapters = self._adapters
        assert adapters is not None
        return self._by_row and all(adapters.runs_by_row(chunk.sequence.slot) for chunk in chunks)

    def tiles(self, batch: StepBatch) -> torch.Tensor | None:
        """As of `lora.tiles_of`; None where the adapters of the batch are to be computed one by one."""
        if batch.slots is None or not self.runs_by_row(batch.chunks):
            return None
        return tiles_of(batch.chunks, self._device)

    def without_graphs(self) -> bool:
        """Do without graphs from the next `allocate` on; False if there were none."""
        had, self._has_graphs = self._has_graphs, False
        return had
