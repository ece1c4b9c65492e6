"""A request for a marketplace slug, from its parsed body: checks the fields that the service reads."""

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Final

from serve_app.access.auth import Caller
from serve_app.api.bodies.json_body import JsonObject
from serve_app.api.schema.sampling import parse_body
from serve_app.api.schema.slug import PriceBody, SlugFields
from serve_app.base.errors import InvalidRequest
from serve_app.base.explain import show
from serve_app.config.marketplace import TokenBounds
from serve_app.marketplace.bounds import Bounds, PromptSize
from serve_app.marketplace.choice import PriceOptions
from serve_app.marketplace.slugs import Marketplace, Slug, Wanted

_CHOICES: Final = ("n", "best_of")


@dataclass(frozen=True, slots=True)
class SlugRequest:
    """`content`: the body as it was received; an endpoint gets it with few changes. `num_choices`: how many replies
    an upstream may make of it. `raw`: the body, parsed, if an endpoint may be served here.
    """

    wanted: Wanted
    body: SlugFields
    content: bytes
    size: PromptSize
    num_choices: int = 1
    raw: JsonObject = field(default_factory=dict)

    @property
    def requested(self) -> str:
        """The caller's own name for the slug or its endpoint; replies repeat it."""
        return self.body.model

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def cache_key(self) -> str:
        return self.body.prompt_cache_key or ""

    @property
    def price_options(self) -> PriceOptions:
        price = self.body.price or PriceBody()
        return PriceOptions(_usd(price.max_prompt), _usd(price.max_completion), price.sort or "price")

    def bounds_at(self, tokens: TokenBounds) -> Bounds:
        """The most tokens that it can use at a remote endpoint."""
        return Bounds.of(self.size, self.body.most_tokens, self.num_choices, tokens)


def wanted_slug(marketplace: Marketplace, requested: object, caller: Caller) -> Wanted | None:
    """The slug, and the endpoint if one is pinned; None if no slug has this name, or this caller may not use it. Raises
    `ModelNotFound` for an unknown endpoint.
    """
    if not isinstance(requested, str):
        return None
    slug = marketplace.slug_of(requested)
    return marketplace.find(requested) if slug is not None and may_use(caller, slug) else None


def may_use(caller: Caller, slug: Slug) -> bool:
    return caller.models is None or slug.id in caller.models


def slug_request(wanted: Wanted, kind: type[SlugFields], raw: JsonObject, content: bytes) -> SlugRequest:
    """Raises `InvalidRequest`."""
    body = parse_body(kind, raw)
    num_choices = max(_count(raw.get(name)) for name in _CHOICES)
    kept = raw if any(endpoint.upstream is None for endpoint in wanted.slug.endpoints) else {}
    request = SlugRequest(wanted, body, content, PromptSize.of(content, body.said), num_choices, kept)
    if not request.stream and not wanted.slug.config.allow_whole:
        sentence = f"stream must be true for the marketplace slug {wanted.slug.id!r}, got {show(body.stream)}."
        raise InvalidRequest(sentence, "stream")
    if body.stream_options is not None and not request.stream:
        raise InvalidRequest(f"stream_options needs stream to be true, got {show(body.stream)}.", "stream_options")
    return request


def _count(value: object) -> int:
    """1 for what no upstream takes for a number."""
    try:
        return max(1, int(float(value))) if isinstance(value, int | float | str) else 1
    except (ValueError, OverflowError):
        return 1


def _usd(limit: float | None) -> Decimal | None:
    """The decimal that the caller wrote: `repr` gives the shortest one of a float."""
    return None if limit is None else Decimal(repr(limit))
