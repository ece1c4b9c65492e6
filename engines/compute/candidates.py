"""Which compute paths a model has on this machine, and in which order they are tried."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from engines.attention.sdpa import SdpaBackend
from engines.compute.exact_path import ExactPath
from engines.compute.native_path import NativePath
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.plain_path import PlainPath
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.model.packed_linear import copy_weights, pack_linears
from engines.native.build import BuildFailed, library_path
from engines.native.library import Library
from engines.native.structure import Unsupported, read_structure

logger = logging.getLogger(__name__)


def candidate_paths(model: PagedModel, config: EngineConfig, *, threads: int) -> Iterator[ComputePath]:
    """The paths of a model, the fastest first. `threads`: of the C kernels.

    Each path is built when it is asked for, after those before it have failed, because a path may change the model.
    Raises `ModelRefused` when the configuration demands something that is not possible.
    """
    if model.whole_images:
        yield _whole_image_path(model, config)
        return
    if _wants_triton(config, model.loaded.device):
        yield from _triton_paths(model, config)
        if config.attention != "auto":
            return
    # Replacing a layer that is split over devices would also replace its exchange between them.
    if config.attention != "sdpa" and model.shards is None:
        native = _native_path(model, config, threads)
        if native is not None:
            yield native
            return  # its path takes the layers from the model
    yield _torch_path(model, config)


def _whole_image_path(model: PagedModel, config: EngineConfig) -> PlainPath:
    """The only backend in which the tokens of an image attend to each other in both directions. Of the models that have
    such images (Gemma 3), the C kernels compute no other layer either.
    """
    if config.attention not in ("auto", "sdpa"):
        raise ModelRefused(
            f"attention must be 'auto' or 'sdpa' for {model.loaded.config.model_type}, not {config.attention!r}: the "
            "tokens of an image attend to each other in both directions."
        )
    path = PlainPath(model, config.block_size, partial(SdpaBackend, whole_images=True))
    _pack(model, config)
    return path


def _wants_triton(config: EngineConfig, device: torch.device) -> bool:
    if config.exact or config.attention in ("sdpa", "native"):
        return False
    return config.attention != "auto" or device.type == "cuda"


def _triton_paths(model: PagedModel, config: EngineConfig) -> Iterator[ComputePath]:
    try:
        from engines.compute.device_candidates import device_candidates  # Triton comes with torch for CUDA alone
    except ImportError as exc:
        if config.attention != "auto":
            raise ModelRefused(f"attention = {config.attention!r} is not possible here: {exc}") from exc
        logger.warning("computing with torch alone, not with Triton kernels: %s", exc)
        return
    yield from device_candidates(model, config)


def _native_path(model: PagedModel, config: EngineConfig, threads: int) -> NativePath | None:
    """None when the C kernels cannot compute the model; the reason is logged."""
    try:
        parts = read_structure(model.loaded, dict(model.attention))
        library = Library(library_path(Path(config.kernel_cache).expanduser()))
    except (Unsupported, BuildFailed, OSError) as exc:
        if config.attention == "native":
            raise ModelRefused(f"attention = 'native' is not possible here: {exc}") from exc
        level = logging.INFO if isinstance(exc, Unsupported) else logging.WARNING
        logger.log(level, "computing with torch alone, not with the C kernels: %s", exc)
        return None
    path = NativePath(model, parts, library, config, threads=threads)
    _pack(model, config)  # what the kernels left: a vision tower
    return path


def _torch_path(model: PagedModel, config: EngineConfig) -> PlainPath | ExactPath:
    path = ExactPath(model, config.block_size) if config.exact else PlainPath(model, config.block_size)
    _pack(model, config)
    return path


def _pack(model: PagedModel, config: EngineConfig) -> None:
    """Replace the linear layers that torch computes on a CPU by faster ones."""
    if model.loaded.device.type == "cpu" and model.shards is None:
        logger.info("%d linear layers packed for the CPU", pack_linears(model.loaded.model, tiled=config.exact))
        copy_weights(model.loaded.model)
