"""The slugs that are configured, with the state of their endpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serve_app.base.errors import ConfigRefused, ModelNotFound
from serve_app.base.explain import near
from serve_app.config.checking.refusal import Refusal
from serve_app.config.keys import upstream_key
from serve_app.config.marketplace import EndpointConfig, MarketplaceConfig, SlugConfig, UpstreamConfig
from serve_app.config.price import Price
from serve_app.marketplace.recent import Recent
from serve_app.marketplace.shared_health import SharedHealth
from serve_app.marketplace.upstream import Upstream

_PIN = "/ep/"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place that generates replies; exactly one of `model`, which is local, and `upstream` is set."""

    config: EndpointConfig
    upstream: Upstream | None
    health: SharedHealth = field(default_factory=SharedHealth)
    recent: Recent = field(default_factory=Recent)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def model(self) -> str | None:
        return self.config.model

    @property
    def price(self) -> Price:
        return self.config.price


@dataclass(frozen=True, slots=True)
class Slug:
    """One slug with its endpoints, in configured order."""

    config: SlugConfig
    endpoints: tuple[Endpoint, ...]

    @property
    def id(self) -> str:
        return self.config.id


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for: a slug, or one endpoint of it, without fallback."""

    slug: Slug
    pinned: Endpoint | None = None


@dataclass(frozen=True, slots=True)
class Marketplace:
    """All slugs. `refusals`: those whose upstream's key could not be read; they are as they were before."""

    slugs: Mapping[str, Slug] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    @classmethod
    def of(cls, config: MarketplaceConfig, before: "Marketplace | None" = None) -> "Marketplace":
        """Reads keys from files, so call it in a thread. An endpoint of which nothing changed keeps its health, its
        measurements and its connections.
        """
        last = before.slugs if before is not None else {}
        slugs: dict[str, Slug] = {}
        refusals: list[Refusal] = []
        for index, slug in enumerate(config.slugs):
            previous = last.get(slug.id)
            try:
                slugs[slug.id] = _opened(slug, previous)
            except ConfigRefused as exc:
                refusals.append(Refusal(f"marketplace.slugs[{index}]", str(exc)))
                if previous is not None:
                    slugs[slug.id] = previous
        return cls(slugs, tuple(refusals))

    def slug_of(self, requested: str) -> Slug | None:
        """The slug that the request field `model` names, with an endpoint or without; None if it names none."""
        slug = self.slugs.get(requested)
        return slug if slug is not None else self.slugs.get(requested.rpartition(_PIN)[0])

    def find(self, requested: str) -> Wanted | None:
        """None if it is no slug. Raises `ModelNotFound` for an unknown endpoint of a slug: first check that the caller
        may use the slug.
        """
        slug = self.slug_of(requested)
        if slug is None:
            return None
        if slug.id == requested:
            return Wanted(slug)
        name = requested.rpartition(_PIN)[2]
        pinned = next((endpoint for endpoint in slug.endpoints if endpoint.name == name), None)
        if pinned is None:
            hint = near(name, (endpoint.name for endpoint in slug.endpoints))
            raise ModelNotFound(f"The model {slug.id!r} has no endpoint {name!r}.{hint}", "model")
        return Wanted(slug, pinned)

    async def close(self, after: "Marketplace | None" = None) -> None:
        """Close the connections that `after`, which replaces this one, does not use. A reply under way is finished, and
        its connection closed then.
        """
        kept = set() if after is None else {id(upstream) for upstream in after.upstreams()}
        for upstream in self.upstreams():
            if id(upstream) not in kept:
                await upstream.close()

    def upstreams(self) -> list[Upstream]:
        endpoints = (endpoint for slug in self.slugs.values() for endpoint in slug.endpoints)
        return [endpoint.upstream for endpoint in endpoints if endpoint.upstream is not None]


def _opened(config: SlugConfig, before: Slug | None) -> Slug:
    """Raises `ConfigRefused` if a key cannot be read."""
    last = {} if before is None else {endpoint.name: endpoint for endpoint in before.endpoints}
    return Slug(config, tuple(_endpoint(config.id, endpoint, last.get(endpoint.name)) for endpoint in config.endpoints))


def _endpoint(slug_id: str, config: EndpointConfig, before: Endpoint | None) -> Endpoint:
    key = None if config.upstream is None else _key(f"{slug_id}{_PIN}{config.name}", config.upstream)
    if before is not None and _place(before.config) == _place(config) and _key_of(before) == key:
        return replace(before, config=config)
    return Endpoint(config, None if config.upstream is None else Upstream(config.upstream, key))


def _place(config: EndpointConfig) -> tuple[object, ...]:
    """Where its replies come from. The rest, such as the price, can change without it."""
    return config.model, config.owner, config.upstream


def _key_of(endpoint: Endpoint) -> str | None:
    return None if endpoint.upstream is None else endpoint.upstream.key


def _key(name: str, config: UpstreamConfig) -> str | None:
    if config.key is None:
        return None
    return upstream_key(f"The key of the endpoint {name!r}", config.key.env, config.key.file)
