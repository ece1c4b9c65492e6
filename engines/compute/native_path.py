"""Puts the C kernels into a model that they can compute, if this machine can build them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.attention.interface import Attention
from engines.config import EngineConfig
from engines.errors import ModelRefused
from engines.model.loader import LoadedModel
from engines.model.row_tiles import RowTiles
from engines.native.build import BuildFailed, library_path
from engines.native.decoder import NativeDecoder
from engines.native.library import Library
from engines.native.structure import Unsupported, read_structure
from engines.tensors.batch import PROBE_TOKENS, StepBatch

logger = logging.getLogger(__name__)


class NativeModel:
    """What is left of a transformers model around a `NativeDecoder`: its embedding and its rotary positions."""

    def __init__(self, model: Any, decoder: NativeDecoder, context_length: int) -> None:
        self.decoder = decoder
        self._model = model
        positions = torch.arange(context_length)[None]
        # In float32, whatever the model's type. All rotations that depend on the length are refused at load.
        cos, sin = model.model.rotary_emb(torch.empty(1, 1, 1), position_ids=positions)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    def run(self, batch: StepBatch, logit_rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] float32 of the rows `logit_rows` [R]."""
        with (
            RowTiles()
        ):  # the kernels give every row its own bits, and an adapter of the embedding is torch's to compute
            hidden = self._model.get_input_embeddings()(batch.token_ids[None])[0]
        rotation = self._cos.index_select(0, batch.positions), self._sin.index_select(0, batch.positions)
        return self.decoder.run(hidden.to(torch.float32, copy=True), rotation, batch, logit_rows)


def install_kernels(
    loaded: LoadedModel, attention: Mapping[int, Attention], config: EngineConfig, *, threads: int
) -> NativeModel | None:
    """The model on the kernels, its own layers and head freed; None when torch's are kept, and why is logged.
    `attention`: what each layer asked for. Raises `ModelRefused` instead if the kernels were demanded.
    """
    if config.attention == "sdpa":
        return None
    try:
        parts = read_structure(loaded, dict(attention))
        library = Library(library_path(Path(config.kernel_cache).expanduser()))
    except (Unsupported, BuildFailed, OSError) as exc:
        if config.attention == "native":
            raise ModelRefused(f"attention = 'native' is not possible here: {exc}") from exc
        level = logging.INFO if isinstance(exc, Unsupported) else logging.WARNING
        logger.log(level, "computing with torch alone, not with the C kernels: %s", exc)
        return None
    decoder = NativeDecoder(
        library,
        parts,
        block_size=config.block_size,
        max_tokens=max(config.max_step_tokens, config.max_step_tokens_decoding, PROBE_TOKENS) + config.max_running,
        max_slots=config.max_adapters,
        threads=threads,
    )
    loaded.model.model.layers = nn.ModuleList()
    loaded.model.set_output_embeddings(None)
    logger.info("C kernels: %d threads, AMX %s", threads, "on" if library.uses_amx() else "off")
    return NativeModel(loaded.model, decoder, config.context_length or loaded.context_length)
