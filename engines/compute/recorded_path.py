"""The device path with its decode steps recorded once and replayed."""

from collections.abc import Callable, Sequence

import torch

from engines.compute.device_path import DevicePath
from engines.gpu.graphs import DecodeGraphs, Forward
from engines.gpu.lora import RowAdapters
from engines.interface.errors import EngineError
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch


class RecordedPath:
    """Implements `path.ComputePath` over a `DevicePath`, which computes everything that is not recorded. `make_graphs`
    is called for each new KV cache.
    """

    row_multiple = 1

    def __init__(self, path: DevicePath, make_graphs: Callable[[Forward], DecodeGraphs]) -> None:
        self._path = path
        self._make_graphs = make_graphs
        self._graphs = make_graphs(path.forward_rows)

    @property
    def adapters(self) -> RowAdapters:
        return self._path.adapters

    def allocate(self, num_blocks: int) -> None:
        self._path.allocate(num_blocks)
        self._graphs = self._make_graphs(self._path.forward_rows)

    def warm_up(self) -> None:
        """Record the graphs of all buckets now, so that no request waits for a recording."""
        try:
            self._graphs.capture_all()
        except Exception as exc:  # a model that looks at the device in between, or no memory left
            raise EngineError(f"decode steps are not recorded as graphs: {exc}") from exc

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._path.forward(batch)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> tuple[StepBatch, torch.Tensor] | None:
        if any(chunk.length != 1 or chunk.sequence.request.images for chunk in chunks):
            return None  # tokens after an image have other rotary positions
        if not self._path.runs_by_row(chunks):
            return None
        return self._graphs.run(chunks, carried)
