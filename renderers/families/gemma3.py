"""Gemma, Gemma 2 and Gemma 3: turns of user and model, no reasoning, no tools."""

from renderers.families.generic import GenericRenderer
from renderers.families.tagged import known_ids, needed_id
from renderers.markers import Tokenizer
from renderers.templates.chat_template import ChatTemplate

_TURN = "<start_of_turn>"
_TURN_END = "<end_of_turn>"


class Gemma3Renderer(GenericRenderer):
    """The end of a turn and that of the text end a reply, whichever the tokenizer calls its end token."""

    name = "gemma3"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        super().__init__(tokenizer, template)
        self.stop_token_ids |= known_ids(
            needed_id(self.name, self._template, _TURN_END), self._template.added.id_of("<eos>")
        )


def recognises(template: ChatTemplate) -> bool:
    """Whether the template writes these turns, as markers."""
    return template.has_markers(_TURN, _TURN_END) and template.user_text.endswith(f"{_TURN}model\n")
