"""The interface of a renderer: both directions of one model family.

Messages become token ids by the model's own chat template. Token ids become reasoning, text and tool calls by a strict
incremental parser of our own. A reply flows

    token ids -> Detokenizer -> Piece -> StopMatcher -> Piece -> ReplyParser -> Delta
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from renderers.deltas import Delta, Piece
from renderers.messages import Conversation, Effort, Tool


class RenderError(ValueError):
    """The conversation cannot be rendered for this model: the caller's fault. `param` is the request field."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


class TemplateRefused(RenderError):
    """The chat template cannot be served: it does not compile, or the origin of its special tokens is unknown."""

    def __init__(self, message: str, param: str = "model") -> None:
        super().__init__(message, param)


class PromptTooLong(RenderError):
    """The rendered text certainly exceeds every context window of the model. It has at least `num_tokens`; counting
    stopped there.
    """

    def __init__(self, limit: int, num_tokens: int) -> None:
        super().__init__(f"messages must have fewer tokens than {limit}, got at least {num_tokens}.")
        self.args = (limit, num_tokens)
        self.num_tokens = num_tokens


class ReplyEnd(StrEnum):
    """How a reply ended: at the model's end token, or cut (by length, by a stop string or by a caller's stop id)."""

    END = "end"
    CUT = "cut"


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids of a prompt, and the text with which it starts the assistant's reply (a prefilled `<think>`)."""

    token_ids: tuple[int, ...]
    prefill: str = ""


class ReplyParser(Protocol):
    """Parses one reply. The concatenation per field does not depend on how the reply is cut into pieces."""

    @property
    def malformed(self) -> bool:
        """Whether the reply is not in the family's format. A stream continues as plain text from the error on. A reply
        that is sent whole is then only `raw_text`. Final after `finish`.
        """

    @property
    def raw_text(self) -> str:
        """All pieces so far as plain text, markers spelled out, without the end token that closed the reply."""

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]: ...

    def finish(self, end: ReplyEnd) -> list[Delta]:
        """Flush the text that was held back. Call once, last."""


class Renderer(Protocol):
    """One family, bound to one tokenizer and template. Thread-safe and stateless after construction."""

    @property
    def name(self) -> str: ...

    @property
    def supports_tools(self) -> bool:
        """Whether calls are parsed out of replies."""

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The model's own end tokens; they always stop a reply."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that always stop a reply, for families without an end token."""

    def check_effort(self, effort: Effort | None) -> None:
        """Raises `RenderError` (param `reasoning_effort`), listing the accepted values, for a value that is not one of
        them.
        """

    def render(self, conversation: Conversation) -> RenderedPrompt:
        """Raises `RenderError`, with the template's own message where the template refuses."""

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> ReplyParser: ...
