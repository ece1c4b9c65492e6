"""Response bodies, for the OpenAPI description. `api/chunks.py` writes those of the generating endpoints piece by
piece; these types describe the result.
"""

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict  # pydantic cannot read the one of `typing` before Python 3.12

_DECIMAL = r"^[0-9]+(\.[0-9]+)?$"


class CachedTokens(TypedDict):
    cached_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class UsageReply(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class UsedAmounts(TypedDict):
    """`prompt_tokens` include those of the cache and of images; `cost_usd` is an exact decimal."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    image_tokens: int
    cost_usd: str


class UsedOnDay(UsedAmounts):
    object: Literal["usage"]
    day: str


class UsedByModel(UsedAmounts):
    """`model`: a base model or a slug; null for requests that no model took."""

    object: Literal["usage"]
    model: str | None


UsageList = TypedDict(
    "UsageList",
    {
        "object": Literal["list"],
        "from": str,
        "to": str,
        "by": Literal["day", "model"],
        "data": list[UsedOnDay] | list[UsedByModel],
        "total": UsedAmounts,
    },
)
"""What a key used from one time until before another."""


class FunctionReply(TypedDict):
    name: str
    arguments: str


class ToolCallReply(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionReply


class ToolCallDelta(ToolCallReply):
    index: int


class ChatMessage(TypedDict):
    """Every field is present, null when empty."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    name: None
    tool_calls: list[ToolCallReply] | None
    tool_call_id: None


class _ModelHead(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class CheckpointReply(_ModelHead):
    """A checkpoint in GET /models. `created`: time of the last change, 0 where the store gives none. `base_model`: the
    served model that it was trained on, null when the checkpoint does not name it. `error`: why it cannot be sampled,
    null if no reason is known. A listing reads only the first bytes of local files. `digest`: the content that was read
    last, null if none was. `tier`: where that content is: in a device slot of a replica, on a disk of the ingress, or
    only in the store.
    """

    base_model: str | None
    error: str | None
    digest: str | None
    tier: Literal["device", "disk", "store"]


class ModelReply(_ModelHead):
    """A base model in GET /models. `context_length` in tokens, prompt and completion."""

    context_length: int


class SlugReply(_ModelHead):
    """A marketplace slug, or one endpoint of it, in GET /models. `created` is always 0."""


class ModelList(TypedDict):
    """`has_more`: there is another page, or not all checkpoints could be listed. `next`: the parameter `after` of the
    next page, null on the last one.
    """

    object: Literal["list"]
    data: list[ModelReply | SlugReply | CheckpointReply]
    has_more: bool
    next: str | None


class LoadReply(TypedDict):
    """How one replica loaded a checkpoint. `seconds`: until it had sampled a token, null if it could not; then `error`
    says why.
    """

    replica: str
    object: Literal["load"]
    seconds: float | None
    error: str | None


class LoadList(TypedDict):
    """One entry per running replica. `digest`: the content that was loaded."""

    object: Literal["list"]
    digest: str
    data: list[LoadReply]


class PriceReply(TypedDict):
    """USD per million tokens, as exact decimals. `cached`: of prompt tokens that came from a prefix cache."""

    prompt: Annotated[str, Field(pattern=_DECIMAL)]
    cached: Annotated[str, Field(pattern=_DECIMAL)]
    completion: Annotated[str, Field(pattern=_DECIMAL)]


class EndpointReply(TypedDict):
    """An endpoint of a marketplace slug. `model` with it, `<slug>/ep/<name>`, pins it.

    `health`: `up`; `cooling` after a failure; `probing` once that is over and one request tries it; `not_ready` if no
    replica of its model can produce a token. `first_token_s` and `tokens_per_s`: averages of recent requests, null
    until there was one.
    """

    name: str
    object: Literal["endpoint"]
    local: bool
    price: PriceReply
    health: Literal["up", "cooling", "probing", "not_ready"]
    first_token_s: float | None
    tokens_per_s: float | None


class EndpointList(TypedDict):
    """The endpoints in the order of the configuration."""

    object: Literal["list"]
    data: list[EndpointReply]


class ChatTop(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(ChatTop):
    top_logprobs: list[ChatTop]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class TextLogprobs(TypedDict):
    """One item per token in each list. The first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(TypedDict):
    """The ids are present with `return_token_ids`; those of the prompt only in the first chunk."""

    index: Literal[0]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: TextLogprobs | None


class TextChunkChoice(_Choice):
    text: str
    finish_reason: Literal["stop", "length"] | None
    logprobs: TextLogprobs | None


class ChatChoice(_Choice):
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None


class ChatDelta(TypedDict):
    """The new part of the message. The first chunk has the role; a tool call comes complete."""

    role: NotRequired[Literal["assistant"]]
    content: str | None
    reasoning_content: str | None
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    logprobs: ChatLogprobs | None


class _Whole(TypedDict):
    id: str
    created: int
    model: str
    usage: UsageReply


class _Chunk(TypedDict):
    """All chunks of a stream share id, created and model. With `include_usage` one more chunk, without a choice, has
    the usage; it is null in the others.
    """

    id: str
    created: int
    model: str
    usage: NotRequired[UsageReply | None]


class TextCompletion(_Whole):
    object: Literal["text_completion"]
    choices: Annotated[list[TextChoice], Field(min_length=1, max_length=1)]


class TextCompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: Annotated[list[TextChunkChoice], Field(max_length=1)]


class ChatCompletion(_Whole):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1, max_length=1)]


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]


class StatusReply(TypedDict):
    """`config_errors`: the refused parts of the last configuration, such as `models[1]`; the log has the reasons."""

    status: Literal["ok", "ready"]
    config_errors: NotRequired[list[str]]


class VersionReply(TypedDict):
    version: str


class ErrorDetail(TypedDict):
    """`type`: `invalid_request_error`, `authentication_error`, `rate_limit_error` or `server_error`; or a word of a
    remote endpoint. `param`: the path of the invalid request field. `code`: more specific than the status.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The body at every status but 200, and the last event of a stream that failed."""

    error: ErrorDetail
