"""A model loaded, verified and sized, ready to compute: the same steps on every process of a tensor-parallel group."""

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engines.compute import self_test
from engines.compute.runner import ModelRunner
from engines.config import EngineConfig
from engines.cores import available_cores
from engines.errors import ModelRefused
from engines.lora.shards import Shards
from engines.model.loader import LoadedModel, load_model
from engines.tensors.kv_cache import blocks_for, free_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """`num_blocks`: of the KV cache, the trash block included. `threads`: for torch, on the thread that computes."""

    loaded: LoadedModel
    runner: ModelRunner
    context_length: int
    num_blocks: int
    threads: int


def assemble_model(config: EngineConfig) -> AssembledModel:
    """Takes as long as loading the model. Under `torch.inference_mode`. Raises `ModelRefused`."""
    cores = config.threads or max(1, available_cores() // config.tensor_parallel)
    threads = 1 if config.exact else cores  # of torch, which cuts sums between threads
    torch.set_num_threads(threads)
    loaded = load_model(config)
    context_length = _context_length(config, loaded)
    shards = None
    if config.tensor_parallel > 1:
        shards = Shards.of(loaded.model, dist.get_rank(), config.tensor_parallel)
    test = self_test.prepare(loaded, context_length) if config.self_test else None
    runner = ModelRunner(loaded, config, threads=cores, shards=shards)
    if test is not None:
        _check_model(test, runner, loaded, config)
    budget = _kv_budget(config, loaded, runner)
    if shards is not None:  # before anything that one process alone could refuse
        smallest = torch.tensor([budget], device=loaded.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        budget = int(smallest)
    num_blocks = blocks_for(
        runner.shapes,
        config.block_size,
        budget_bytes=budget,
        context_length=context_length,
        max_running=config.max_running,
    )
    runner.allocate(num_blocks)
    runner.warm_up()
    return AssembledModel(loaded, runner, context_length, num_blocks, threads)


def _check_model(test: self_test.SelfTest, runner: ModelRunner, loaded: LoadedModel, config: EngineConfig) -> None:
    """Raises `ModelRefused` for a model that would not be served exactly, whatever is done without."""
    while True:
        try:
            self_test.check(test, runner, loaded, config)
        except Exception as exc:  # whatever a compiler or a driver raises
            if not runner.fall_back():
                raise
            logger.warning("what computes %s on %s is given up: %s", config.source, loaded.device, exc, exc_info=True)
        else:
            break
    if config.exact:
        self_test.check_exact(test, runner, loaded, config)


def _kv_budget(config: EngineConfig, loaded: LoadedModel, runner: ModelRunner) -> int:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    free = int(free_memory(loaded.device) * config.memory_fraction)
    return max(0, free - config.max_running * runner.state_bytes)


def _context_length(config: EngineConfig, loaded: LoadedModel) -> int:
    """Raises `ModelRefused` when more is asked for than the model was made for."""
    if config.context_length is None:
        return loaded.context_length
    if config.context_length > loaded.context_length:
        raise ModelRefused(
            f"context_length = {config.context_length} is more than the {loaded.context_length} tokens that "
            f"{config.source!r} was made for."
        )
    return config.context_length
