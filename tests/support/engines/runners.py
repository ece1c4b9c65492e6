"""A runner over the first compute path that a model has, without the self-test."""

from engines.compute.candidates import candidate_paths
from engines.compute.paged_model import PagedModel
from engines.compute.runner import ModelRunner
from engines.interface.config import EngineConfig
from engines.model.loader import LoadedModel


def runner_of(loaded: LoadedModel, config: EngineConfig, *, threads: int = 1) -> ModelRunner:
    model = PagedModel.of(loaded, config)
    return ModelRunner(next(candidate_paths(model, config, threads=threads)), config, model)
