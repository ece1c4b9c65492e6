"""The body of POST /chat/completions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    model_validator,
)

from renderers.messages import Effort
from serve_app.api.bodies.ignored_fields import Known, known
from serve_app.api.schema.completion import image_url
from serve_app.api.schema.input_types import (
    EFFORT_MAX,
    ArgumentsInput,
    ContentInput,
    EffortInput,
    RequiredContentInput,
    ToolChoiceInput,
)
from serve_app.api.schema.sampling import MAX_LOGPROBS, SamplingFields, Section
from serve_app.base.explain import Complaint


@dataclass(frozen=True, slots=True)
class TextContent:
    text: str


@dataclass(frozen=True, slots=True)
class ImageContent:
    url: str


ContentPart = TextContent | ImageContent


def _content(value: object) -> tuple[ContentPart, ...] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return (TextContent(value),)
    if not isinstance(value, list):
        raise Complaint("must be a string or a list of parts", value)
    return tuple(_part(part, f"[{index}]") for index, part in enumerate(value))


def _part(part: object, suffix: str) -> ContentPart:
    if not isinstance(part, dict):
        raise Complaint("must be an object", part, suffix)
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise Complaint("must be a string", text, f"{suffix}.text")
        return TextContent(text)
    if kind == "image_url":
        return ImageContent(image_url(part, suffix))
    raise Complaint('must be "text" or "image_url"', kind, f"{suffix}.type")


def _arguments(value: object) -> str:
    """The arguments of a call as text. The renderer parses them, and checks there that they are a JSON object."""
    if not isinstance(value, str):
        raise Complaint("must be a string that holds a JSON object", value)
    return value or "{}"  # several clients send it for a call without arguments


def _effort(value: object) -> Effort | None:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float) and abs(value) <= EFFORT_MAX:  # the renderer decides which values a model accepts
        return value
    raise Complaint("must be a string, a number or a boolean", value)


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """The one function that `tool_choice` demands."""

    name: str


ToolChoice = Literal["none", "auto", "required"] | NamedFunction


def _tool_choice(value: object) -> ToolChoice | None:
    if value is None or value == "none" or value == "auto" or value == "required":
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return NamedFunction(name)
        raise Complaint("must be the name of a function", name, ".function.name")
    raise Complaint('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}', value)


class FunctionCall(Section):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, PlainValidator(_arguments, json_schema_input_type=ArgumentsInput)]


_Name = Annotated[str, Field(min_length=1, max_length=256)]


class ToolCallBody(Section):
    id: _Name
    type: Literal["function"] | None = None
    function: FunctionCall


class MessageBody(Section):
    """One message; the fields that its role does not have must be unset."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        tuple[ContentPart, ...] | None, PlainValidator(_content, json_schema_input_type=ContentInput)
    ] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(fail_fast=True)] | None = None
    tool_call_id: _Name | None = None
    name: _Name | None = None


class _Role(BaseModel):
    """The fields of one role, for the OpenAPI description. `api/validate.py` enforces the same rules."""

    model_config = ConfigDict(extra="allow")

    content: RequiredContentInput
    reasoning_content: Literal[""] | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=0)] | None = None
    tool_call_id: None = None
    name: _Name | None = None


class SystemMessage(_Role):
    role: Literal["system", "developer"]


class UserMessage(_Role):
    role: Literal["user"]


class ToolMessage(_Role):
    """The result of a call."""

    role: Literal["tool"]
    tool_call_id: _Name  # type: ignore[assignment]  # of its role alone


class AssistantMessage(BaseModel):
    """A message of the model, or one that the caller wrote in its place."""

    model_config = ConfigDict(extra="allow")

    role: Literal["assistant"]
    content: ContentInput = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: None = None
    name: _Name | None = None


MessagesInput = Annotated[list[SystemMessage | UserMessage | AssistantMessage | ToolMessage], Field(min_length=1)]


def _as_it_is(value: object) -> object:
    return value


class FunctionBody(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolBody(Section):
    type: Literal["function"]
    function: FunctionBody
    _declared: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    _num_characters: int = PrivateAttr(default=0)

    @property
    def declared(self) -> Mapping[str, Any]:
        """The tool as the caller declared it; templates render this."""
        return self._declared

    @property
    def num_characters(self) -> int:
        """The length of the declaration as JSON."""
        return self._num_characters

    @model_validator(mode="wrap")
    @classmethod
    def _keep_declared(cls, value: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        body = check(value)
        assert isinstance(value, dict)
        try:
            # 1e999 is read as infinity, which templates would write out.
            body._num_characters = len(json.dumps(value, allow_nan=False, ensure_ascii=False))
        except ValueError as exc:
            raise Complaint("must hold finite numbers only", value) from exc
        body._declared = value
        return body


class ChatBody(SamplingFields):
    """POST /chat/completions. `max_completion_tokens` overrides `max_tokens`."""

    messages: Annotated[
        list[MessageBody],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_as_it_is, json_schema_input_type=MessagesInput),
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning_effort: Annotated[Effort | None, PlainValidator(_effort, json_schema_input_type=EffortInput)] = None
    separate_reasoning: bool | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] | None = None
    tool_choice: Annotated[ToolChoice | None, PlainValidator(_tool_choice, json_schema_input_type=ToolChoiceInput)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def names(cls) -> Known:
        call = known(ToolCallBody.model_fields, function=known(FunctionCall.model_fields))
        part = dict.fromkeys(("type", "text", "image_url"))
        message = known(MessageBody.model_fields, content=part, tool_calls=call)
        return {**super().names(), "messages": message}
