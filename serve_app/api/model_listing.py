"""The bodies of GET /models and GET /models/{id}."""

from collections.abc import Iterator

from serve_app.access.auth import Caller
from serve_app.api.schema.replies import CheckpointReply, ModelList, ModelReply
from serve_app.catalog.catalog import Catalog, ListedCheckpoint
from serve_app.catalog.served_model import ServedModel
from serve_app.model_id import BaseModelId

_CHECKPOINT_OWNER = "user"  # the usual value for fine-tuned models; the owner's name stays private


async def list_models(catalog: Catalog, caller: Caller, *, with_checkpoints: bool) -> ModelList:
    """Every base model that the caller may use, with its variants, and the checkpoints on request.

    `has_more`: there are too many checkpoints to list them all.
    """
    items: list[ModelReply | CheckpointReply] = []
    for model in catalog.visible_to(caller):
        items += _with_variants(model)
    checkpoints, are_all = await catalog.checkpoints_of(caller) if with_checkpoints else ([], True)
    items += [_checkpoint(checkpoint, catalog.base_id(checkpoint.base_model)) for checkpoint in checkpoints]
    return {"object": "list", "data": items, "has_more": not are_all}


async def describe(catalog: Catalog, requested: str, caller: Caller) -> ModelReply:
    """One base model or checkpoint. Raises what `Catalog.resolve` raises."""
    target = await catalog.resolve(requested, caller)
    return _item(requested, target.model, target.context_length)


def _with_variants(model: ServedModel) -> Iterator[ModelReply]:
    yield _item(model.id, model, model.context_length)
    for variant, context_length in model.config.variants.items():
        yield _item(str(BaseModelId(model.id, variant)), model, context_length)


def _item(name: str, model: ServedModel, context_length: int) -> ModelReply:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": model.config.owned_by,
        "context_length": context_length,
    }


def _checkpoint(checkpoint: ListedCheckpoint, base: str | None) -> CheckpointReply:
    return {
        "id": str(checkpoint.path),
        "object": "model",
        "created": int(checkpoint.changed_at),
        "owned_by": _CHECKPOINT_OWNER,
        "base_model": base,
        "error": checkpoint.problem,
    }
