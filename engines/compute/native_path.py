"""The native path: C kernels replace a model's decoder layers and output head, on a CPU."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engines.compute.paged_model import PagedModel
from engines.config import EngineConfig
from engines.model.row_tiles import RowTiles
from engines.native.adapters import NativeAdapters
from engines.native.decoder import NativeDecoder
from engines.native.library import Library
from engines.native.structure import DecoderParts
from engines.planning.scheduler import Chunk
from engines.tensors.batch import PROBE_TOKENS, Carried, StepBatch

logger = logging.getLogger(__name__)


class NativePath:
    """Implements `path.ComputePath`. Frees the model's layers and head: no other path can follow this one.

    torch computes the embedding and the rotary positions. The bits of a row do not depend on the batch.
    """

    row_multiple = 1

    def __init__(
        self, model: PagedModel, parts: DecoderParts, library: Library, config: EngineConfig, *, threads: int
    ) -> None:
        self._decoder = NativeDecoder(
            library,
            parts,
            block_size=config.block_size,
            max_tokens=max(config.max_step_tokens, config.max_step_tokens_decoding, PROBE_TOKENS) + config.max_running,
            max_slots=config.max_adapters,
            threads=threads,
        )
        self._decoder.allocate(1)
        self._context = model.context
        self._model: Any = model.loaded.model
        self._model.model.layers = nn.ModuleList()
        self._model.set_output_embeddings(None)
        self.adapters = NativeAdapters(
            self._decoder, model.adapter_modules(), layers=parts.path, head=model.targets.head or ""
        )
        positions = torch.arange(model.context_length)[None]
        # In float32, whatever the model's type. All rotations that depend on the length are refused at load.
        cos, sin = self._model.model.rotary_emb(torch.empty(1, 1, 1), position_ids=positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        logger.info("C kernels: %d threads, AMX %s", threads, "on" if library.uses_amx() else "off")

    def allocate(self, num_blocks: int) -> None:
        self._decoder.allocate(num_blocks)

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """In float32."""
        self._context.set(batch)
        with RowTiles():  # an adapter of the embedding is torch's to compute
            hidden = self._model.get_input_embeddings()(batch.token_ids[None])[0]
        rotation = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        return self._decoder.run(hidden.to(torch.float32, copy=True), rotation, batch, batch.logit_rows)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Nothing is recorded."""
