"""A model loaded, verified and sized, ready to compute: the same steps on every process of a tensor-parallel group."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from engines.compute import self_test
from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.compute.path import ComputePath
from engines.compute.runner import ModelRunner
from engines.host.cores import available_cores
from engines.interface.config import EngineConfig
from engines.lora.format.targets import LoraTargets
from engines.lora.shards import Shards
from engines.model.loader import check_context_length, load_model
from engines.tensors.kv_cache import blocks_for, free_memory
from engines.vision.features import ImageCounters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A model that is ready to compute. `targets`: what adapters may change. `has_states`, `whole_images`: see
    `PagedModel`. `images`: counted as they are computed; None if the model takes none. `num_blocks`: of the KV cache,
    the trash block included. `threads`: for torch, on the thread that computes.
    """

    runner: ModelRunner
    targets: LoraTargets
    has_states: bool
    images: ImageCounters | None
    whole_images: bool
    vocab_size: int
    context_length: int
    num_blocks: int
    threads: int


class Candidates(Protocol):
    def __call__(self, model: PagedModel, config: EngineConfig, *, threads: int) -> Iterator[ComputePath]:
        """As `candidates.candidate_paths`."""


def assemble_model(config: EngineConfig, candidates: Candidates = candidate_paths) -> AssembledModel:
    """Load, verify and size the model. Call it under `torch.inference_mode`. Raises `ModelRefused`."""
    cores = config.threads or max(1, available_cores() // config.tensor_parallel)
    threads = 1 if config.exact else cores  # of torch, which cuts sums between threads
    torch.set_num_threads(threads)
    loaded = load_model(config)
    check_context_length(config, loaded.context_length)
    context_length = config.context_length or loaded.context_length
    shards = None
    if config.tensor_parallel > 1:
        shards = Shards.of(loaded.model, dist.get_rank(), config.tensor_parallel)
    test = self_test.prepare(loaded, context_length) if config.self_test else None
    model = PagedModel.of(loaded, config, shards)
    runner, num_blocks = _first_that_works(candidates(model, config, threads=cores), model, config, test)
    if loaded.device.type == "cuda":
        torch.cuda.synchronize(loaded.device)  # another thread computes from here on
    return AssembledModel(
        runner=runner,
        targets=model.targets,
        has_states=model.has_states,
        images=None if model.vision is None else model.vision.cache.counters,
        whole_images=model.whole_images,
        vocab_size=loaded.vocab_size,
        context_length=context_length,
        num_blocks=num_blocks,
        threads=threads,
    )


def _first_that_works(
    paths: Iterable[ComputePath], model: PagedModel, config: EngineConfig, test: self_test.SelfTest | None
) -> tuple[ModelRunner, int]:
    """A runner on the first path that passes, and the number of blocks of its KV cache. Raises what the last path
    raised.
    """
    failure: Exception | None = None
    num_blocks: int | None = None
    for path in paths:
        if failure is not None:
            _log_given_up(failure, model, config)
            failure = None  # its traceback holds the path's memory
        runner = ModelRunner(path, config, model)
        try:
            if test is not None:
                _check(test, runner, model, config)
        except Exception as exc:  # whatever a compiler or a driver raises
            failure = exc
            continue
        if (
            num_blocks is None
        ):  # once: torch keeps a failed path's memory for the next one and does not count it as free
            num_blocks = _num_blocks(model, config)
        runner.allocate(num_blocks)
        try:
            runner.warm_up()
        except Exception as exc:
            failure = exc
            continue
        return runner, num_blocks
    assert failure is not None, "there is always a path"
    raise failure


def _check(test: self_test.SelfTest, runner: ModelRunner, model: PagedModel, config: EngineConfig) -> None:
    """Raises `ModelRefused` for a model that would not be served exactly."""
    self_test.check(test, runner, model.loaded, config)
    if config.exact:
        self_test.check_exact(test, runner, model.loaded, config)


def _log_given_up(failure: Exception, model: PagedModel, config: EngineConfig) -> None:
    logger.warning(
        "computing %s on %s failed, trying the next compute path: %s",
        config.source,
        model.loaded.device,
        failure,
        exc_info=failure,
    )


def _num_blocks(model: PagedModel, config: EngineConfig) -> int:
    """As many blocks as fit into memory now. Raises `ModelRefused` when that is too few."""
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        free = int(free_memory(model.loaded.device) * config.memory_fraction)
        budget = max(0, free - config.max_running * model.state_bytes)
    if model.shards is not None:  # before anything that one process alone could refuse
        smallest = torch.tensor([budget], device=model.loaded.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        budget = int(smallest)
    return blocks_for(
        model.shapes,
        config.block_size,
        budget_bytes=budget,
        context_length=model.context_length,
        max_running=config.max_running,
    )
