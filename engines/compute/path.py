"""The protocol of all compute paths."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engines.lora.apply import AdapterModules
from engines.native.adapters import NativeAdapters
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch


class ComputePath(Protocol):
    """One way to compute a model on a paged KV cache. Used by one thread at a time. A new path is complete; its cache
    holds only the trash block.

    `row_multiple`: the rows of every batch are filled up to a multiple of it.
    """

    row_multiple: int

    @property
    def adapters(self) -> AdapterModules | NativeAdapters:
        """Puts adapters into the slots that batches name."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache anew, trash block included. The content of the old one is lost."""

    def warm_up(self) -> None:
        """Do now what would delay the first requests. Called after the last `allocate`."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits [R, vocab] of the batch's `logit_rows`. They are valid until the next call."""

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """The batch, and logits [rows, vocab] after each chunk of one token, by recorded decode steps. None when no
        step is recorded for these chunks. Does not wait for the device.
        """
