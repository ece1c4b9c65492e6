"""Endpoints of marketplace slugs that are served here: the model that one runs on, and whether it is ready."""

from dataclasses import replace

from serve_app.access.auth import Caller
from serve_app.api.answer import Edge
from serve_app.api.opening import Find
from serve_app.base.errors import CheckpointError, NoReplica, RequestError
from serve_app.base.model_id import parse
from serve_app.catalog.catalog import ResolvedModel
from serve_app.marketplace.slugs import Endpoint, Slug


class NotServed(Exception):
    """The model of an endpoint cannot be found."""


async def not_ready(edge: Edge, slug: Slug) -> frozenset[str]:
    """The names of the endpoints whose model cannot produce a token now. An endpoint that names a checkpoint only is
    not among them: its base model is known once the checkpoint was looked up.
    """
    models = {endpoint.name: _base(endpoint) for endpoint in slug.endpoints}
    served = edge.catalog.apps
    apps = {name: served[base] for name, base in models.items() if base in served}
    reasons = await edge.replicas.readiness(set(apps.values())) if apps else {}
    return frozenset(name for name, base in models.items() if base and (name not in apps or reasons[apps[name]]))


def model_of(endpoint: Endpoint, requested: str, tenant: str) -> Find:
    """Finds the model of an endpoint with the operator's authority for exactly that model. Replies show `requested`;
    `tenant` is the name of the caller's key. Raises `NotServed` or `NoReplica`.
    """
    assert endpoint.model is not None
    name, operator = endpoint.model, Caller(tenant, owner=endpoint.config.owner)

    async def find(edge: Edge) -> ResolvedModel:
        try:
            target = await edge.catalog.resolve(name, operator)
        except (RequestError, CheckpointError) as exc:
            raise NotServed(str(exc)) from exc
        if not _base(endpoint):
            reason = (await edge.replicas.readiness({target.deployment}))[target.deployment]
            if reason is not None:
                raise NoReplica(reason)
        return replace(target, requested=requested)

    return find


def _base(endpoint: Endpoint) -> str:
    """The id of the base model that an endpoint names; empty if it names none."""
    base = None if endpoint.model is None else parse(endpoint.model).base
    return "" if base is None else base.name
