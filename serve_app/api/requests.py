"""The validated requests of both endpoints. `validate.py` makes these values; all later steps read them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Final

from engines.interface.protocol import SamplingParams
from renderers.base import Renderer
from renderers.messages import Conversation
from serve_app.api.schema.chat import ToolChoice
from serve_app.api.schema.completion import Prompt
from serve_app.images.preparing import ImageUrl

SAMPLING_DEFAULTS: Final[Mapping[str, float]] = {
    field.name: field.default for field in fields(SamplingParams) if isinstance(field.default, int | float)
}
"""The values of unset sampling fields: the engine's own defaults, declared only there."""

Sampling = partial[SamplingParams]
"""All of `SamplingParams` but `max_tokens`, which depends on the length of the prompt."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the reply contains and how it is sent. `logprobs`: the number of alternatives, None for no
    log-probabilities.
    """

    stream: bool
    include_usage: bool
    return_token_ids: bool
    logprobs: int | None
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ToolRules:
    """What the reply is checked against."""

    choice: ToolChoice = "auto"
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat that its model accepts. `images`: its parts refer to them by index. `tools_characters`: the length of the
    declarations as JSON. `max_tokens` None: up to the end of the context.
    """

    conversation: Conversation
    images: tuple[ImageUrl, ...]
    tools_characters: int
    renderer: Renderer
    tool_rules: ToolRules
    separate_reasoning: bool
    max_tokens: int | None
    sampling: Sampling
    options: ReplyOptions
    prompt_cache_key: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A prompt that its model accepts, as text or token ids. `chunks`: the value of `prompt_chunks`; `prompt` then has
    the token ids of all chunks.
    """

    prompt: Prompt
    chunks: tuple[tuple[int, ...] | ImageUrl, ...]
    echo: bool
    max_tokens: int | None
    sampling: Sampling
    options: ReplyOptions
    prompt_cache_key: str
