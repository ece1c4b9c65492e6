"""Which adapter applies to which row of the forward pass that is running."""

from dataclasses import dataclass

import torch

from engines.batch import AdapterRows, StepBatch


@dataclass(slots=True)
class AdapterContext:
    """Set by the model runner before each forward and read by the wrapped modules; the engine loop's thread owns it.

    `slots` [T] int32: the slot of each row, -1 for none; None when no row has one.
    """

    rows: tuple[AdapterRows, ...] = ()
    head_rows: tuple[AdapterRows, ...] = ()
    slots: torch.Tensor | None = None

    def set(self, batch: StepBatch) -> None:
        self.rows = batch.adapter_rows
        self.head_rows = batch.head_adapter_rows
        self.slots = batch.slots
