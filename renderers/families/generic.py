"""Any model with a chat template: rendered by the template, replies taken as they are."""

from collections.abc import Sequence

from renderers.base import RenderedPrompt, ReplyEnd
from renderers.deltas import Delta, Piece, TextDelta
from renderers.efforts import refuse_effort
from renderers.families.tagged import known_ids, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Effort, Tool
from renderers.templates.chat_template import ChatTemplate


class GenericRenderer:
    """No reasoning and no tool calls are parsed: they come back as text."""

    name = "generic"
    supports_tools = False
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._template = needed_template(self.name, template)
        self.stop_token_ids = self._template.turn_end_ids | known_ids(tokenizer.eos_token_id)

    def check_effort(self, effort: Effort | None) -> None:
        refuse_effort(effort)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        return RenderedPrompt(self._template.render(conversation).token_ids)

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> "PlainParser":
        return PlainParser(self.stop_token_ids)


class PlainParser:
    """A reply without structure. It cannot be malformed. An end token in the middle is text, like any marker.

    `framing` is what the format puts before a reply. It is dropped if present; its beginning is held back until that is
    certain.
    """

    malformed = False

    def __init__(self, stop_token_ids: frozenset[int], framing: str = "") -> None:
        self._stop_token_ids = stop_token_ids
        self._raw: list[str] = []
        self._end = ""
        self._framing = framing
        self._held = ""  # a beginning of the framing

    @property
    def raw_text(self) -> str:
        return "".join(self._raw)

    def feed(self, pieces: Sequence[Piece]) -> list[Delta]:
        texts: list[str] = []
        for piece in pieces:
            if self._end:
                texts.append(self._end)
                self._end = ""
            if piece.token_id in self._stop_token_ids:
                self._end = piece.text
            else:
                texts.append(piece.text)
        self._raw += texts
        text = self._unframed("".join(texts))
        return [TextDelta(text)] if text else []

    def finish(self, end: ReplyEnd) -> list[Delta]:
        return [TextDelta(self._held)] if self._held else []

    def _unframed(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if text == self._framing or not self._framing.startswith(text):
            text, self._framing = text.removeprefix(self._framing), ""
        elif text:
            text, self._held = "", text
        return text
