"""Which adapter applies to which row of the forward pass that is running."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engines.planning.sequence import NO_SLOT
from engines.tensors.batch import StepBatch


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows that one adapter slot applies to."""

    slot: int
    rows: torch.Tensor  # [rows] int64


@dataclass(slots=True)
class AdapterContext:
    """Set by the compute path before each forward and read by the wrapped modules. The engine loop's thread owns it.

    - `slots` [T] int32: the slot of each row, -1 for none. None when no row has one.
    - `rows`: the same by adapter. `head_rows`: for the rows whose logits are wanted, numbered 0 … R-1.
    - `by_row`: modules use only `slots` and `head_slots`, on the device. `rows` are not made then, since the host would
      have to wait for them.
    - `tiles`: runs of rows with the same adapter, for modules that use them.
    """

    slots: torch.Tensor | None = None
    head_slots: torch.Tensor | None = None
    by_row: bool = False
    tiles: torch.Tensor | None = None
    _rows: tuple[AdapterRows, ...] | None = ()
    _head_rows: tuple[AdapterRows, ...] | None = ()

    def set(self, batch: StepBatch, *, by_row: bool = False, tiles: torch.Tensor | None = None) -> None:
        self.slots = batch.slots
        self.head_slots = None if batch.slots is None else batch.slots[batch.logit_rows]
        self.by_row, self.tiles = by_row, tiles
        self._rows = self._head_rows = () if by_row else None

    @contextmanager
    def narrowed(self, rows: torch.Tensor) -> Iterator[None]:
        """Inside it, the batch is these rows [n] of the whole one. For a layer that is called with some of the rows."""
        whole = self.slots, self._rows
        self.slots = None if self.slots is None else self.slots[rows]
        self._rows = None
        try:
            yield
        finally:
            self.slots, self._rows = whole

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside it, no row has an adapter. For a forward over other rows than those of the batch."""
        whole = self.slots, self.head_slots, self.by_row, self.tiles, self._rows, self._head_rows
        self.slots = self.head_slots = self.tiles = None
        self.by_row, self._rows, self._head_rows = False, (), ()
        try:
            yield
        finally:
            self.slots, self.head_slots, self.by_row, self.tiles, self._rows, self._head_rows = whole

    @property
    def rows(self) -> tuple[AdapterRows, ...]:
        if self._rows is None:
            self._rows = _by_adapter(self.slots)
        return self._rows

    @property
    def head_rows(self) -> tuple[AdapterRows, ...]:
        if self._head_rows is None:
            self._head_rows = _by_adapter(self.head_slots)
        return self._head_rows


def _by_adapter(slots: torch.Tensor | None) -> tuple[AdapterRows, ...]:
    if slots is None:
        return ()
    present = sorted(set(slots.tolist()) - {NO_SLOT})
    return tuple(AdapterRows(slot, (slots == slot).nonzero()[:, 0]) for slot in present)
