"""Copies between host and device that neither waits for."""

from typing import Any

import torch


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Copies asynchronously; does not wait for queued device work, as `torch.tensor(…, device=…)` would."""
    # From pinned memory: of other memory more than 64 KB may have to wait.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def rows_of(matrix: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows. The indices are ascending and distinct."""
    return matrix if len(rows) == matrix.shape[0] else matrix.index_select(0, to_device(rows, matrix.device))


def with_rows(vector: torch.Tensor, rows: list[int], values: torch.Tensor) -> torch.Tensor:
    """A tensor with these values at these rows. The indices are ascending and distinct."""
    return values if len(rows) == vector.shape[0] else vector.index_copy(0, to_device(rows, vector.device), values)


class Arriving:
    """Tensors that are being copied to the host."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors[0].is_cuda:
            self._tensors = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def get(self) -> tuple[torch.Tensor, ...]:
        """Waits until the copy is complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
