"""The bodies of GET /models, GET /models/{id} and GET /models/{slug}/endpoints."""

from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Literal

from serve_app.access.auth import Caller
from serve_app.api.answer import Edge
from serve_app.api.schema.replies import (
    CheckpointReply,
    EndpointList,
    EndpointReply,
    ModelList,
    ModelReply,
    PriceReply,
    SlugReply,
)
from serve_app.api.slugs.local_endpoints import not_ready
from serve_app.api.slugs.request import may_use, wanted_slug
from serve_app.base.model_id import BaseModelId
from serve_app.catalog.catalog import ListedCheckpoint
from serve_app.catalog.served_model import ServedModel
from serve_app.config.price import Price
from serve_app.marketplace.slugs import Endpoint, Slug, Wanted
from serve_app.replicas.status import adapter_key

_CHECKPOINT_OWNER = "user"  # the usual value for fine-tuned models; the owner's name stays private


async def list_models(edge: Edge, caller: Caller) -> ModelList:
    """Every base model that the caller may use, with its variants, and every slug."""
    items: list[ModelReply | SlugReply | CheckpointReply] = []
    for model in await edge.catalog.visible_to(caller):
        items += _with_variants(model)
    items += [_slug(slug.id, slug) for slug in edge.marketplace.slugs.values() if may_use(caller, slug)]
    return {"object": "list", "data": items, "has_more": False, "next": None}


async def list_checkpoints(edge: Edge, caller: Caller, after: str | None) -> ModelList:
    """A page of the checkpoints that the caller may use. The first page begins with what `list_models` has. Raises
    `InvalidRequest`.
    """
    page = await edge.catalog.checkpoints_of(caller, after)
    items = [_checkpoint(edge, checkpoint) for checkpoint in page.checkpoints]
    before = (await list_models(edge, caller))["data"] if after is None else []
    return {"object": "list", "data": [*before, *items], "has_more": page.has_more, "next": page.next}


async def describe(edge: Edge, requested: str, caller: Caller) -> ModelReply | SlugReply:
    """One slug, endpoint of a slug, base model or checkpoint. Raises what `Catalog.resolve` raises."""
    wanted = wanted_slug(edge.marketplace, requested, caller)
    if wanted is not None:
        return _slug(requested, wanted.slug)
    target = await edge.catalog.resolve(requested, caller)
    return _item(requested, target.model, target.context_length)


async def list_endpoints(edge: Edge, wanted: Wanted, caller: Caller) -> EndpointList:
    """The endpoints of a slug, or the one that is pinned, with their health for this caller."""
    chosen = wanted.slug.endpoints if wanted.pinned is None else (wanted.pinned,)
    down = await not_ready(edge, wanted.slug)
    return {"object": "list", "data": [_endpoint(endpoint, down, caller.name) for endpoint in chosen]}


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


def _slug(name: str, slug: Slug) -> SlugReply:
    return {"id": name, "object": "model", "created": 0, "owned_by": slug.config.owned_by}


def _endpoint(endpoint: Endpoint, down: Collection[str], key: str) -> EndpointReply:
    return {
        "name": endpoint.name,
        "object": "endpoint",
        "local": endpoint.upstream is None,
        "price": _price(endpoint.price),
        "health": "not_ready" if endpoint.name in down else endpoint.health.state_for(key).value,
        "first_token_s": endpoint.recent.first_token_s,
        "tokens_per_s": endpoint.recent.tokens_per_s,
    }


def _price(price: Price) -> PriceReply:
    return {"prompt": _usd(price.prompt), "cached": _usd(price.of_cached), "completion": _usd(price.completion)}


def _usd(price: Decimal) -> str:
    return f"{price.normalize():f}"


def _checkpoint(edge: Edge, checkpoint: ListedCheckpoint) -> CheckpointReply:
    return {
        "id": str(checkpoint.path),
        "object": "model",
        "created": int(checkpoint.changed_at),
        "owned_by": _CHECKPOINT_OWNER,
        "base_model": edge.catalog.base_id(checkpoint.base_model),
        "error": checkpoint.problem,
        "digest": checkpoint.digest,
        "tier": _tier(edge, checkpoint),
    }


def _tier(edge: Edge, checkpoint: ListedCheckpoint) -> Literal["device", "disk", "store"]:
    deployment = edge.catalog.deployment_of(checkpoint.base_model)
    if checkpoint.digest and deployment and adapter_key(checkpoint.digest) in edge.replicas.held(deployment):
        return "device"
    return "disk" if checkpoint.is_here else "store"
