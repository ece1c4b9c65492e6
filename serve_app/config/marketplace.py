"""The slugs of the marketplace: one name for several endpoints, which are local models or remote upstreams."""

from typing import Annotated, Self

from annotated_types import Gt, Le
from pydantic import AfterValidator, Field, StringConstraints, model_validator
from typing_extensions import Doc
from yarl import URL

from serve_app.base.errors import InvalidRequest
from serve_app.base.explain import Complaint
from serve_app.base.model_id import parse
from serve_app.base.public_addresses import NotPublic, check_host
from serve_app.config.catalog_entry import model_name
from serve_app.config.checking.section import Count, Seconds, Section, Text
from serve_app.config.checking.url import HttpUrl
from serve_app.config.keys import VariableName
from serve_app.config.price import Price

EndpointName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Weight = Annotated[float, Gt(0), Le(1000)]


def _local_model(value: str) -> str:
    try:
        parse(value)
    except InvalidRequest as exc:
        raise Complaint(f"must name a model or checkpoint ({exc})", value) from None
    return value


class UpstreamKey(Section):
    """Where the key of an upstream is read from."""

    env: Annotated[
        VariableName | None,
        Doc("Environment variable of the ingress that holds the key. Give exactly one of `env` and `file`."),
    ] = None
    file: Annotated[Text | None, Doc("File that holds the key.")] = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("env", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            raise Complaint("must have exactly one of env and file", given)
        return self


class Takes(Section):
    """What an upstream understands beside the common fields."""

    prompt_cache_key: Annotated[bool, Doc("Whether `prompt_cache_key` is sent to it.")] = False
    stream_usage: Annotated[
        bool,
        Doc("Whether it understands `stream_options.include_usage`; if not, the usage of streams is estimated."),
    ] = True


class TokenBounds(Section):
    """The most tokens that a request can have there. Budgets hold so many, and no more are believed."""

    context: Annotated[Count | None, Doc("Most tokens of prompt and reply together; null: unknown.")] = None
    reply: Annotated[Count, Doc("Most tokens of a reply for which the request sets no limit.")] = 32_768
    image: Annotated[Count, Doc("Most tokens of an image, or of another part of a message that is no text.")] = 16_384
    template: Annotated[
        Count, Doc("Most tokens that its template and its own instructions add to a prompt, besides each message's.")
    ] = 1024


class UpstreamConfig(Section):
    """A remote OpenAI-compatible API."""

    url: Annotated[HttpUrl, Doc("Base URL of its API, such as `https://api.example.com/v1`.")]
    model: Annotated[Text, Doc("Its own name for the model, sent as `model`.")]
    key: Annotated[UpstreamKey | None, Doc("Where its key is read from; null: none is sent.")] = None
    allow_private: Annotated[
        bool, Doc("Whether it may be at an address of a private network, such as another service of the cluster.")
    ] = False
    takes: Annotated[Takes, Doc("What it understands.")] = Takes()
    tokens: Annotated[
        TokenBounds, Doc("The most tokens of a request, which budgets hold until the upstream has counted.")
    ] = TokenBounds()
    connect_timeout_s: Annotated[Seconds, Doc("Longest wait for a connection.")] = 5.0
    first_byte_timeout_s: Annotated[
        Seconds, Doc("Longest wait for the first event of a stream, from the start of the request.")
    ] = 60.0
    idle_timeout_s: Annotated[Seconds, Doc("Longest silence between two events; comments do not count.")] = 60.0
    total_timeout_s: Annotated[
        Seconds, Doc("Longest stream after its first event, and longest wait for a whole reply.")
    ] = 3600.0

    @model_validator(mode="after")
    def _at_a_public_address(self) -> Self:
        host = URL(self.url).host
        try:
            if not self.allow_private and host is not None:
                check_host(host)
        except NotPublic:
            raise Complaint("must be at a public address unless allow_private is true", self.url, ".url") from None
        return self


class EndpointConfig(Section):
    """One place that generates replies for a slug: a local model or a remote upstream."""

    name: Annotated[EndpointName, Doc("Name that clients see, unique within the slug.")]
    model: Annotated[
        Annotated[str, AfterValidator(_local_model)] | None,
        Doc(
            "A model of this file, a variant of it, or a checkpoint, as clients write it. "
            "Give exactly one of `model` and `upstream`."
        ),
    ] = None
    owner: Annotated[Text | None, Doc("Owner whose private checkpoints the endpoint may use; null: none.")] = None
    upstream: Annotated[UpstreamConfig | None, Doc("A remote API.")] = None
    price: Annotated[Price, Doc("What its tokens cost.")]
    weight: Annotated[Weight, Doc("Its share of the prompt cache keys, relative to the other endpoints.")] = 1.0

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        given = [name for name in ("model", "upstream") if getattr(self, name) is not None]
        if len(given) != 1:
            raise Complaint("must have exactly one of model and upstream", given)
        if self.owner is not None and self.model is None:
            raise Complaint("is for local models only", self.owner, ".owner")
        return self


class SlugConfig(Section):
    """One slug."""

    id: Annotated[
        str,
        AfterValidator(model_name),
        Doc('Id that clients send as `model`, unlike those of models, without ":", ";", "/ep/" and spaces.'),
    ]
    allow_whole: Annotated[bool, Doc("Whether requests without `stream: true` are answered too.")] = False
    owned_by: Annotated[Text, Doc("Shown by `GET /models`.")] = "roundhouse"
    endpoints: Annotated[
        tuple[EndpointConfig, ...], Field(strict=False), Doc("Where its replies come from; at least one.")
    ]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        if not self.endpoints:
            raise Complaint("must not be empty", self.endpoints, ".endpoints")
        names = [endpoint.name for endpoint in self.endpoints]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise Complaint("must be unique", name, f".endpoints[{index}].name")
        return self


class MarketplaceConfig(Section):
    """All slugs."""

    slugs: Annotated[tuple[SlugConfig, ...], Field(strict=False), Doc("The slugs; each is read separately.")] = ()
