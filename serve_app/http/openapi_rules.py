"""Rules between the fields of a body, as JSON Schema. `api/validate.py` enforces them; tests compare the two."""

from collections.abc import Mapping
from typing import TypeAlias

Json: TypeAlias = "str | int | bool | list[Json] | dict[str, Json] | None"
Object: TypeAlias = dict[str, Json]

_NULL: Object = {"type": "null"}


def _set_to(name: str, schema: Object) -> Object:
    """The field is set to this schema."""
    return {"required": [name], "properties": {name: schema}}


def _needs(field: str, unless: Object, needed: Object) -> Object:
    """`field` is unset or matches `unless`, or the field that it needs is set."""
    unset: list[Json] = [_NULL, unless] if unless else [_NULL]
    return {"anyOf": [{"properties": {field: {"anyOf": unset}}}, needed]}


_STREAM_OPTIONS = _needs("stream_options", {}, _set_to("stream", {"const": True}))
_PROMPT: Object = {
    "anyOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": ["string", "array"]}, "prompt_chunks": _NULL}},
        {
            "required": ["prompt_chunks"],
            "properties": {"prompt_chunks": {"type": "array"}, "prompt": _NULL, "echo": {"enum": [False, None]}},
        },
    ]
}
RULES: Mapping[str, tuple[Object, ...]] = {
    "ChatBody": (
        _STREAM_OPTIONS,
        _needs("top_logprobs", {}, _set_to("logprobs", {"const": True})),
        _needs("tool_choice", {"enum": ["none", "auto"]}, _set_to("tools", {"type": "array", "minItems": 1})),
    ),
    "CompletionBody": (
        _STREAM_OPTIONS,
        _PROMPT,
        _needs("max_tokens", {"type": "integer", "minimum": 1}, _set_to("echo", {"const": True})),
    ),
    "SlugChatBody": (_STREAM_OPTIONS,),
    "SlugCompletionBody": (_STREAM_OPTIONS,),
}
