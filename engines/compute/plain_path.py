"""The plain path: transformers' own forward, on any device."""

from collections.abc import Callable, Sequence

import torch

from engines.attention.interface import AttentionBackend
from engines.attention.sdpa import SdpaBackend
from engines.compute.paged_model import PagedModel
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch
from engines.tensors.kv_cache import KVCache


class PlainPath:
    """Implements `path.ComputePath`: torch computes every layer, and adapters are added one after another."""

    row_multiple = 1

    def __init__(
        self, model: PagedModel, block_size: int, make_backend: Callable[[KVCache], AttentionBackend] = SdpaBackend
    ) -> None:
        self.adapters = model.adapter_modules()
        self._model = model
        self._block_size = block_size
        self._make_backend = make_backend
        self._backend = self._over_cache(1)

    def allocate(self, num_blocks: int) -> None:
        self._backend = self._over_cache(num_blocks)

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._model.context.set(batch)
        return self._model.compute(batch, batch.logit_rows, self._backend)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Nothing is recorded."""

    def _over_cache(self, num_blocks: int) -> AttentionBackend:
        model = self._model
        return self._make_backend(KVCache(model.shapes, num_blocks, self._block_size, model.loaded.device))
