"""Which adapter applies to which row of the forward pass that is running."""

from dataclasses import dataclass

from engines.batch import AdapterRows, StepBatch


@dataclass(slots=True)
class AdapterContext:
    """Set by the model runner before each forward and read by the wrapped modules; the engine loop's thread owns it."""

    rows: tuple[AdapterRows, ...] = ()
    head_rows: tuple[AdapterRows, ...] = ()

    def set(self, batch: StepBatch) -> None:
        self.rows = batch.adapter_rows
        self.head_rows = batch.head_adapter_rows

    def clear(self) -> None:
        self.rows = self.head_rows = ()
