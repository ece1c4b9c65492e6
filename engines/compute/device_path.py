"""The device path: Triton kernels for the attention, and for adapters row by row."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from engines.compute.paged_model import PagedModel
from engines.gpu.attention import PagedLayout, TritonBackend, is_interpreted
from engines.gpu.flashinfer import FlashInferBackend, wrappers_of
from engines.gpu.lora import RowAdapters, tiles_of
from engines.gpu.varlen import Flash, VarlenBackend
from engines.interface.config import AttentionName
from engines.interface.errors import ModelRefused
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch
from engines.tensors.kv_cache import KVCache

_INTERPRETED_PROGRAMS = 8
_PROGRAMS_PER_MULTIPROCESSOR = 2

MakeBackend = Callable[[KVCache], TritonBackend]


def backend_for(attention: AttentionName, device: torch.device) -> MakeBackend:
    """The factory of the attention backend over a cache. Raises `ModelRefused` when it is not possible."""
    if device.type != "cuda" and not is_interpreted():
        raise ModelRefused(f"attention = {attention!r} needs a CUDA device, not {device}.")
    num_programs = _INTERPRETED_PROGRAMS
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        num_programs = count * _PROGRAMS_PER_MULTIPROCESSOR
    if attention == "varlen":
        return partial(VarlenBackend, flash=Flash.of_torch(device), num_programs=num_programs)
    if attention == "flashinfer":
        return partial(FlashInferBackend, make_wrapper=wrappers_of(device), num_programs=num_programs)
    return partial(TritonBackend, num_programs=num_programs)


class DevicePath:
    """Implements `path.ComputePath`. Rows whose adapters change only linear layers get them row by row. For other rows
    adapters are computed one after another.
    """

    row_multiple = 1

    def __init__(self, model: PagedModel, adapters: RowAdapters, make_backend: MakeBackend, block_size: int) -> None:
        self.adapters = adapters
        self._model = model
        self._block_size = block_size
        self._make_backend = make_backend
        self._backend = self._over_cache(1)

    def allocate(self, num_blocks: int) -> None:
        self._backend = self._over_cache(num_blocks)

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        tiles = None
        if batch.slots is not None and self.runs_by_row(batch.chunks):
            tiles = tiles_of(batch.chunks, self._model.loaded.device)
        self._model.context.set(batch, by_row=tiles is not None, tiles=tiles)
        return self._model.compute(batch, batch.logit_rows, self._backend)

    def forward_rows(self, batch: StepBatch, layout: PagedLayout) -> torch.Tensor:
        """As `forward`, for rows of one token that are laid out already, with all adapters row by row."""
        self._backend.use(batch, layout)
        self._model.context.set(batch, by_row=True)
        return self._model.compute(batch, batch.logit_rows, self._backend)

    def runs_by_row(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the adapters of these chunks change only linear layers."""
        return all(self.adapters.runs_by_row(chunk.sequence.slot) for chunk in chunks)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Nothing is recorded: see `RecordedPath`."""

    def _over_cache(self, num_blocks: int) -> TritonBackend:
        model = self._model
        return self._make_backend(KVCache(model.shapes, num_blocks, self._block_size, model.loaded.device))
