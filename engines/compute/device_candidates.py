"""The compute paths of a model on Triton kernels, in the order in which they are tried."""

import logging
from collections.abc import Iterator

from engines.compute.device_path import DevicePath, backend_for
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.plain_path import PlainPath
from engines.compute.recorded_path import RecordedPath
from engines.gpu.graphs import Capture, CudaCapture, DecodeGraphs, Forward, repeat
from engines.gpu.lora import RowAdapters, check_products
from engines.interface.config import EngineConfig

logger = logging.getLogger(__name__)


def device_candidates(model: PagedModel, config: EngineConfig) -> Iterator[ComputePath]:
    """The paths on Triton kernels, the fastest first; see `candidates.candidate_paths`. Raises `ModelRefused` when the
    attention that the configuration demands is not possible.
    """
    make_backend = backend_for(config.attention, model.loaded.device)
    if not _can_adapt_by_row(model):
        yield PlainPath(model, config.block_size, make_backend)
        return
    adapters = row_adapters(model, config)
    path = DevicePath(model, adapters, make_backend, config.block_size)
    if config.cuda_graphs:
        yield recorded(path, model, config)
    yield path
    adapters.withdraw()


def row_adapters(model: PagedModel, config: EngineConfig) -> RowAdapters:
    return RowAdapters(
        model.loaded.model,
        model.context,
        adaptable=model.adaptable,
        head=model.targets.head,
        dtype=model.loaded.dtype,
        device=model.loaded.device,
        num_slots=config.max_adapters,
        max_rank=config.max_adapter_rank,
    )


def recorded(path: DevicePath, model: PagedModel, config: EngineConfig) -> RecordedPath:
    device = model.loaded.device

    def make_graphs(forward: Forward) -> DecodeGraphs:
        capture: Capture = CudaCapture() if device.type == "cuda" else repeat
        return DecodeGraphs(
            forward,
            capture,
            block_size=config.block_size,
            width=-(-model.context_length // config.block_size),
            max_rows=config.max_running,
            device=device,
        )

    return RecordedPath(path, make_graphs)


def _can_adapt_by_row(model: PagedModel) -> bool:
    """Whether adapters can go row by row. Not where layers get only some rows, or a part of the inputs. This also
    checks the kernels' products, since the self-test has no adapters.
    """
    if model.has_states or model.shards is not None:
        return False
    try:
        check_products(model.loaded.dtype, model.loaded.device)
    except Exception:  # whatever a compiler or a driver raises
        logger.warning("adapters are computed one by one, and without graphs", exc_info=True)
        return False
    return True
