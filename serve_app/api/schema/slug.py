"""The body of a request for a marketplace slug: the fields that the service itself reads. All others, and the values of
these, go on to the endpoint.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from serve_app.api.bodies.ignored_fields import Known, known
from serve_app.api.schema.sampling import Number, Section, StreamOptions

MAX_TEMPERATURE = 2

_Limit = Annotated[Number, Field(ge=0)]


class PriceBody(Section):
    """What an endpoint may cost, in USD per million tokens, and which of several endpoints to prefer."""

    model_config = ConfigDict(extra="forbid")

    max_prompt: _Limit | None = None
    max_completion: _Limit | None = None
    sort: Literal["price", "latency", "throughput"] | None = None


class SlugFields(Section):
    """What chats and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    price: PriceBody | None = None

    @classmethod
    def names(cls) -> Known:
        """The names of the fields that are read, at every level."""
        inner = {"stream_options": known(StreamOptions.model_fields), "price": known(PriceBody.model_fields)}
        return known(cls.model_fields, **inner)

    @property
    def most_tokens(self) -> int | None:
        """Of the reply, if the caller set a limit."""
        return self.max_tokens

    @property
    def said(self) -> Sequence[object]:
        """The messages."""
        return ()


class SlugCompletionBody(SlugFields):
    """POST /completions for a marketplace slug."""

    prompt: Annotated[str, Field(min_length=1)]
    prompt_chunks: None = None


class SlugChatBody(SlugFields):
    """POST /chat/completions for a marketplace slug. Some upstreams read `max_completion_tokens`, some `max_tokens`."""

    messages: Annotated[list[Any], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def most_tokens(self) -> int | None:
        return max(filter(None, (self.max_completion_tokens, self.max_tokens)), default=None)

    @property
    def said(self) -> Sequence[object]:
        return self.messages
