"""The pieces that a parsed reply is made of."""

from dataclasses import dataclass

from renderers.messages import ToolCall


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A whole, valid call: a call is held back until it is valid."""

    call: ToolCall


Delta = ReasoningDelta | TextDelta | ToolCallDelta


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of decoded text.

    `token_id` is set when the piece is one special token standing for itself; then `text` is that token's spelling.
    None means ordinary text: characters in it that look like a marker are just characters.
    """

    text: str
    token_id: int | None = None
