"""The native path: C kernels replace a model's decoder layers and output head, on a CPU."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from engines.compute.paged_model import PagedModel
from engines.interface.config import EngineConfig
from engines.model.row_tiles import RowTiles
from engines.native.adapters import NativeAdapters
from engines.native.decoder import DeepRows, NativeDecoder
from engines.native.library import Library
from engines.native.structure import DecoderParts
from engines.planning.scheduler import Chunk
from engines.tensors.batch import PROBE_TOKENS, Carried, ImageRows, StepBatch

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
        self._model = model
        base: Any = model.loaded.model.get_submodule(parts.path)
        base.layers = nn.ModuleList()
        model.loaded.model.set_output_embeddings(None)
        self.adapters = NativeAdapters(
            self._decoder, model.adapter_modules(), layers=f"{parts.path}.layers", head=model.targets.head or ""
        )
        self._rotation = Rotation(base.rotary_emb, model.context_length)
        logger.info("C kernels: %d threads, AMX %s", threads, "on" if library.uses_amx() else "off")

    def allocate(self, num_blocks: int) -> None:
        self._decoder.allocate(num_blocks)

    def warm_up(self) -> None:
        """There is nothing to prepare."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """In float32."""
        self._model.context.set(batch)
        with RowTiles():  # an adapter of the embedding is torch's to compute
            hidden = self._model.loaded.model.get_input_embeddings()(batch.token_ids[None])[0]
        images, deep = batch.images, None
        if images is None:
            rotation = self._rotation.at(batch.positions)
        else:
            rotation = self._rotation.at(batch.positions if images.positions is None else images.positions)
            hidden, deep = images.merged(hidden), _deep_rows(images, hidden.shape[0])
        return self._decoder.run(hidden.to(torch.float32, copy=True), rotation, batch, batch.logit_rows, deep)

    def decode(self, chunks: Sequence[Chunk], carried: Carried | None = None) -> None:
        """Nothing is recorded."""


class Rotation:
    """cos and sin of rotary positions, in float32, whatever the model's type. All rotations that depend on the length
    are refused at load.

    Where positions have several axes, each dimension of a head goes by one of them.
    """

    def __init__(self, rotary: Any, length: int) -> None:
        """`rotary`: transformers' module."""
        cos, sin = rotary(torch.empty(1, 1, 1), position_ids=torch.arange(length)[None])
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self._rotary = rotary
        self._axes: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] or [axes, T] -> cos and sin, [T, head size] each"""
        if positions.dim() == 1:
            return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        if self._axes is None:
            self._axes = self._axes_of_dimensions(positions.shape[0])
        own = positions[self._axes].t()  # [T, head size]
        return self._cos.gather(0, own), self._sin.gather(0, own)

    def _axes_of_dimensions(self, count: int) -> torch.Tensor:
        """Which axis each dimension goes by [head size]: the one whose position alone rotates it."""
        alone = [self._rotary(torch.empty(1, 1, 1), position_ids=_one_axis(axis, count))[1] for axis in range(count)]
        return torch.stack(alone).abs()[:, 0, 0].argmax(dim=0)


def _one_axis(axis: int, count: int) -> torch.Tensor:
    """Positions [axes, 1, 1]: 1 on one axis, 0 on the others."""
    positions = torch.zeros(count, 1, 1, dtype=torch.int64)
    positions[axis] = 1
    return positions


def _deep_rows(images: ImageRows, count: int) -> DeepRows | None:
    if not images.deepstack:
        return None
    of_row = torch.full((count,), -1, dtype=torch.int32)
    of_row[images.rows] = torch.arange(images.rows.shape[0], dtype=torch.int32)
    return DeepRows(of_row, torch.stack(images.deepstack).float())
