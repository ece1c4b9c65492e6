"""What every way of computing a model has in common."""

from collections.abc import Sequence
from typing import Protocol

import torch

from engines.lora.apply import AdapterModules
from engines.native.adapters import NativeAdapters
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch


class ComputePath(Protocol):
    """One way to compute a model on a paged KV cache; one thread at a time. It is complete when it is built, with a
    cache of the trash block alone.

    `row_multiple`: the rows of every batch are filled up to a multiple of it.
    """

    row_multiple: int

    @property
    def adapters(self) -> AdapterModules | NativeAdapters:
        """What puts adapters into the slots that batches name."""

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache anew, trash block included. What lay in the old one is lost."""

    def warm_up(self) -> None:
        """Do now what would hold up the first requests. After the last `allocate`."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits [R, vocab] of the batch's `logit_rows`. They hold until the next call."""

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        """The batch, and logits [rows, vocab] after each chunk of one token, by recorded decode steps; None where there
        is no recorded step for these chunks. Does not wait for the device.
        """
