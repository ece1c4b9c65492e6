"""The requests of both endpoints, validated: what `validate.py` makes and everything behind it reads."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Final

from engines.protocol import SamplingParams
from renderers.base import Renderer
from renderers.messages import Conversation
from serve_app.api.schema.chat import ToolChoice
from serve_app.api.schema.completion import Prompt
from serve_app.images.preparing import ImageUrl

SAMPLING_DEFAULTS: Final[Mapping[str, float]] = {
    field.name: field.default for field in fields(SamplingParams) if isinstance(field.default, int | float)
}
"""What an unset sampling field means: the engine's own defaults, which stand nowhere else."""

Sampling = partial[SamplingParams]
"""All of `SamplingParams` but `max_tokens`, which depends on the length of the prompt."""


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the reply is to hold and how it is sent. `logprobs`: how many alternatives, None for none at all."""

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
    """A chat that its model can take. `images`: by the index that its parts have. `tools_characters`: of the
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
    """A prompt that its model can take, as text or as token ids. `chunks`: as it came in `prompt_chunks`; `prompt` then
    has the token ids of all of them.
    """

    prompt: Prompt
    chunks: tuple[tuple[int, ...] | ImageUrl, ...]
    echo: bool
    max_tokens: int | None
    sampling: Sampling
    options: ReplyOptions
    prompt_cache_key: str
