"""The body of POST /completions."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from serve_app.api.bodies.ignored_fields import Known
from serve_app.api.schema.input_types import PromptChunksInput, PromptInput
from serve_app.api.schema.sampling import MAX_LOGPROBS, SamplingFields, token_ids
from serve_app.base.explain import Complaint


@dataclass(frozen=True, slots=True)
class TokensChunk:
    """Prompt tokens."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """An image, by the caller's URL."""

    url: str


Prompt = str | tuple[int, ...]
PromptChunk = TokensChunk | ImageChunk

_PROMPT_KINDS = "must be a string or a list of token ids"


def _prompt(value: object) -> Prompt | None:
    if value is None:
        return None
    if isinstance(value, list):
        return _one_of_list(value)
    if not isinstance(value, str):
        raise Complaint(_PROMPT_KINDS, value)
    if not value:
        raise Complaint("must not be empty", value)
    return value


def _one_of_list(value: list[Any]) -> Prompt:
    """Token ids, or a list that holds one prompt."""
    holds_prompts = value and isinstance(value[0], str | list)
    if not holds_prompts:
        return token_ids(value, "")
    if len(value) > 1:
        raise Complaint("must be one prompt", value)
    only = value[0]
    if isinstance(only, list):
        return token_ids(only, "[0]")
    if not only:
        raise Complaint("must not be empty", only, "[0]")
    assert isinstance(only, str)
    return only


def _prompt_chunks(value: object) -> tuple[PromptChunk, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise Complaint("must be a list", value)
    if not value:
        raise Complaint("must not be empty", value)
    return tuple(_prompt_chunk(chunk, index) for index, chunk in enumerate(value))


def _prompt_chunk(chunk: object, index: int) -> PromptChunk:
    if not isinstance(chunk, dict):
        raise Complaint("must be an object", chunk, f"[{index}]")
    kind = chunk.get("type")
    if kind == "tokens":
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list):
            raise Complaint("must be a list of token ids", tokens, f"[{index}].tokens")
        return TokensChunk(token_ids(tokens, f"[{index}].tokens"))
    if kind == "image_url":
        return ImageChunk(image_url(chunk, f"[{index}]"))
    raise Complaint('must be "tokens" or "image_url"', kind, f"[{index}].type")


def image_url(part: dict[str, object], suffix: str) -> str:
    """The URL of an `image_url` part: in an object or, from some clients, a plain string."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or not url:
        raise Complaint("must be a URL", url, f"{suffix}.image_url.url")
    return url


class CompletionBody(SamplingFields):
    """POST /completions. `max_tokens` 0 scores the prompt, together with `echo`."""

    prompt: Annotated[Prompt | None, PlainValidator(_prompt, json_schema_input_type=PromptInput)] = None
    prompt_chunks: Annotated[
        tuple[PromptChunk, ...] | None, PlainValidator(_prompt_chunks, json_schema_input_type=PromptChunksInput)
    ] = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @classmethod
    def names(cls) -> Known:
        chunk = dict.fromkeys(("type", "tokens", "image_url"))
        return {**super().names(), "prompt_chunks": chunk}
