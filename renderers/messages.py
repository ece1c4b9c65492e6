"""A conversation as the renderers see it: parsed, checked, frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The `index`-th image of the request. Its pixels are passed separately."""

    index: int


ContentPart = TextPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the API shows it: `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` None means that the message has no text at all (an assistant turn of calls only)."""

    role: Role
    content: tuple[ContentPart, ...] | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        """The text parts, joined without separator."""
        return "".join(part.text for part in self.content or () if isinstance(part, TextPart))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `declared` is the caller's whole `tools[]` item, as templates render it."""

    name: str
    parameters: Mapping[str, Any]
    declared: Mapping[str, Any]


Effort = str | float | bool
"""A `reasoning_effort` as it came in. A bool is never a number here: test it first."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a renderer turns into a prompt. `effort` None leaves the model its own default."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    effort: Effort | None = None
