"""The bodies of GET /models and GET /models/{id}."""

from collections.abc import Iterator

from serve_app.auth import Caller
from serve_app.catalog import Catalog
from serve_app.model_id import BaseModelId
from serve_app.schema.replies import ModelReply
from serve_app.served_model import ServedModel


def list_models(catalog: Catalog, caller: Caller) -> dict[str, object]:
    """Every base model that the caller may use, and every variant of it."""
    return {"object": "list", "data": [item for model in catalog.visible_to(caller) for item in _with_variants(model)]}


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
