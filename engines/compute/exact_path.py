"""The exact path: the bits of a token's logits do not depend on the other tokens of the batch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engines.attention.exact import ExactBackend
from engines.compute.paged_model import PagedModel
from engines.lora.experts import AdaptedExperts
from engines.model.row_tiles import TILE_ROWS, RowTiles
from engines.planning.scheduler import Chunk
from engines.tensors.batch import Carried, StepBatch
from engines.tensors.kv_cache import KVCache


class ExactPath:
    """Implements `path.ComputePath`: torch computes tiles of a fixed number of rows, on one thread."""

    row_multiple = TILE_ROWS

    def __init__(self, model: PagedModel, block_size: int) -> None:
        for path in model.targets.experts:
            AdaptedExperts.around(model.loaded.model, path, model.context, row_multiple=TILE_ROWS)
        self.adapters = model.adapter_modules()
        self._model = model
        self._block_size = block_size
        self._backend = self._over_cache(1)

    def allocate(self, num_blocks: int) -> None:
        self._backend = self._over_cache(num_blocks)

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._model.context.set(batch)
        count = batch.logit_rows.shape[0]
        filled = F.pad(batch.logit_rows, (0, -count % TILE_ROWS))  # whole tiles for the head too
        with RowTiles():
            return self._model.compute(batch, filled, self._backend)[:count]

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Nothing is recorded."""

    def _over_cache(self, num_blocks: int) -> ExactBackend:
        model = self._model
        return ExactBackend(KVCache(model.shapes, num_blocks, self._block_size, model.loaded.device))
