"""Lists and checks checkpoints without running the service: `python -m serve_app checkpoints list | check`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engines.lora.format.weights import LoraTargets, read_adapter
from serve_app.base.errors import ConfigRefused
from serve_app.base.model_id import CheckpointPath
from serve_app.checkpoints import Checkpoint, CheckpointStore
from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.checking.base_names import BaseNames
from serve_app.config.deploy import DeployConfig
from serve_app.config.model import ModelArgs
from serve_app.config.paths import resolve_source


async def list_checkpoints(config: DeployConfig, owner: str | None) -> list[str]:
    """The public checkpoints and those of `owner`, newest first."""
    async with _store(config) as store:
        listing = await store.list(owner)
        paths = list(listing.paths)
        while listing.next is not None:
            listing = await store.list(owner, listing.next)
            paths += listing.paths
        return [str(path) for path in paths]


async def check_checkpoint(config: DeployConfig, path: CheckpointPath, model_id: str | None) -> list[str]:
    """Lines about the checkpoint. Raises the `CheckpointError` or `AdapterError` that a request would get.

    It is read as a replica reads it, against the base model's shapes. The base model's weights are not needed.
    """
    async with _store(config) as store:
        checkpoint = await store.resolve(path)
        model, args = _base(config, checkpoint, model_id)
        targets = LoraTargets.of(_skeleton(args))
        limits = {"max_rank": args.max_adapter_rank, "max_bytes": args.max_adapter_file_bytes}
        async with store.keep(checkpoint.adapter):
            weights = read_adapter(checkpoint.adapter, targets, **limits)
        return [
            f"digest    {checkpoint.digest}",
            f"base      {model.id} (the checkpoint says {checkpoint.base_model})",
            f"owner     {checkpoint.owner or 'none: every key may use it'}",
            f"expires   {checkpoint.expires_at or 'never'}",
            f"rank      {weights.rank}",
            f"modules   {len(weights.pairs)}",
            f"bytes     {weights.nbytes}",
        ]


@asynccontextmanager
async def _store(config: DeployConfig) -> AsyncIterator[CheckpointStore]:
    if config.service is None:
        raise ConfigRefused("The configuration has no api application.")
    store = CheckpointStore.of(config.service.checkpoints)
    try:
        yield store
    finally:
        store.close()


def _base(config: DeployConfig, checkpoint: Checkpoint, model_id: str | None) -> tuple[ModelConfig, ModelArgs]:
    assert config.service is not None
    wanted = model_id or checkpoint.base_model or ""
    for model in BaseNames(config.service.models).meant_by(wanted):
        args = config.apps[model.app]
        if isinstance(args, ModelArgs):
            return model, args
    raise ConfigRefused(f"The base {wanted!r} of the checkpoint is not a served model; name one with --model.")


def _skeleton(args: ModelArgs) -> AutoModelForCausalLM:
    """The base model's modules without their weights."""
    source = resolve_source(args.source)
    try:
        facts = AutoConfig.from_pretrained(source, revision=args.revision, trust_remote_code=args.trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(facts, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as exc:
        raise ConfigRefused(f"The base model at {source!r} cannot be read: {exc}") from exc
