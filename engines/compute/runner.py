"""Runs chunks of sequences on a compute path."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engines.compute.paged_model import PagedModel, probe_chunk
from engines.compute.path import ComputePath
from engines.interface.config import EngineConfig
from engines.lora.apply import AdapterModules
from engines.native.adapters import NativeAdapters
from engines.planning.block_pool import TRASH_BLOCK
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, ImageRows, StepBatch, build_batch


class ModelRunner:
    """Implements `loop.Runner` over any path of a `model`. Used by one thread at a time.

    Running a chunk again writes the same K and V to the same places, so a forward may be repeated.
    """

    repeatable = True

    def __init__(self, path: ComputePath, config: EngineConfig, model: PagedModel) -> None:
        self._path = path
        self._block_size = config.block_size
        self._overlap = config.overlap
        self.model = model
        self._device = model.loaded.device

    @property
    def adapters(self) -> AdapterModules | NativeAdapters:
        return self._path.adapters

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache anew."""
        self._path.allocate(num_blocks)

    def warm_up(self) -> None:
        """Do now what would delay the first requests. Called after the last `allocate`."""
        self._path.warm_up()

    def forward(self, chunks: Sequence[Chunk]) -> tuple[StepBatch, torch.Tensor]:
        """The batch as it was laid out, and logits [wanted rows, vocab] in the path's dtype. They are valid until the
        next call.
        """
        if all(chunk.completes for chunk in chunks):
            decoded = self._path.decode(chunks)
            if decoded is not None:
                return decoded
        batch = self.lay_out(chunks)
        return batch, self.run(batch)

    def lay_out(self, chunks: Sequence[Chunk], images: ImageRows | None = None) -> StepBatch:
        """The chunks as one batch, with their images, which are encoded here. `images`: those that another process
        has encoded.
        """
        batch = build_batch(chunks, self._block_size, self._device, row_multiple=self._path.row_multiple)
        return replace(batch, images=images.to(self._device)) if images else self.model.with_images(batch)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits [wanted rows, vocab] in the path's dtype. They are valid until the next call."""
        return self._path.forward(batch)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """See `loop.Runner`: by the recorded decode steps."""
        return self._path.decode(chunks, carried) if self._overlap else None

    def check_health(self) -> None:
        """Run a few tokens of the base model in the trash block. Raises what the device raises."""
        chunk = probe_chunk([TRASH_BLOCK])
        if not bool(torch.isfinite(self.last_logits([chunk])[chunk.sequence.request_id]).all()):
            raise RuntimeError("the base model's logits are not finite")

    def last_logits(self, chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
        """Logits [vocab] after each chunk, complete or not, by request id."""
        decoded = self._path.decode(chunks)
        if decoded is not None:
            return _by_request(*decoded)
        batch = self.lay_out(chunks)
        ends = torch.tensor([chunk.length for chunk in batch.chunks], device=self._device).cumsum(0) - 1
        batch = replace(batch, logit_rows=ends)
        return _by_request(batch, self.run(batch))


def _by_request(batch: StepBatch, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    copied = logits.to(torch.float32, copy=True)  # what a graph wrote holds until it runs again
    return {chunk.sequence.request_id: row for chunk, row in zip(batch.chunks, copied, strict=True)}
