"""Puts the C kernels into a model that they can compute, if this machine can build them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from engines.attention.interface import Attention
from engines.config import EngineConfig
from engines.errors import ModelRefused
from engines.model_loader import LoadedModel
from engines.native.build import BuildFailed, library_path
from engines.native.decoder import NativeDecoder, NativeHead
from engines.native.library import Library
from engines.native.structure import DecoderParts, Unsupported, read_structure

logger = logging.getLogger(__name__)


def install_kernels(
    loaded: LoadedModel, attention: Mapping[int, Attention], config: EngineConfig, *, threads: int
) -> NativeDecoder | None:
    """The decoder that took the place of the model's layers and head; None when torch's own are kept, and why is
    logged. `attention`: what each layer asked for. Raises `ModelRefused` instead if the kernels were demanded.
    """
    if config.attention == "sdpa":
        return None
    try:
        parts = read_structure(loaded, dict(attention))
        library = Library(library_path(Path(config.kernel_cache).expanduser()))
    except (Unsupported, BuildFailed, OSError) as exc:
        if config.attention == "native":
            raise ModelRefused(f"attention = 'native' is not possible here: {exc}") from exc
        logger.info("computing with torch alone, not with the C kernels: %s", exc)
        return None
    return _replace(loaded.model, parts, library, config, threads)


def _replace(model: Any, parts: DecoderParts, library: Library, config: EngineConfig, threads: int) -> NativeDecoder:
    decoder = NativeDecoder(
        library,
        parts,
        block_size=config.block_size,
        max_tokens=max(config.max_step_tokens, config.max_step_tokens_decoding) + config.max_running,
        max_slots=config.max_adapters,
        threads=threads,
    )
    # The model's forward goes through a list of layers: now it is a list of one, which does the work of all.
    model.model.layers = nn.ModuleList([decoder])
    model.set_output_embeddings(NativeHead(decoder))
    logger.info("C kernels: %d threads, AMX %s", threads, "on" if library.uses_amx() else "off")
    return decoder
