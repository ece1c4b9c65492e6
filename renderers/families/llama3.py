"""Llama 3, 3.1, 3.2, 3.3: headers of roles, no reasoning. Calls are JSON without a marker, so they stay text."""

from renderers.families.generic import GenericRenderer
from renderers.families.tagged import known_ids, needed_id
from renderers.markers import Tokenizer
from renderers.templates.chat_template import ChatTemplate

_TURN_END = "<|eot_id|>"
_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"


class Llama3Renderer(GenericRenderer):
    """A reply also ends where the model waits for a tool, or ends its text."""

    name = "llama3"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        super().__init__(tokenizer, template)
        id_of = self._template.added.id_of
        self.stop_token_ids |= known_ids(
            needed_id(self.name, self._template, _TURN_END), id_of("<|eom_id|>"), id_of("<|end_of_text|>")
        )


def recognises(template: ChatTemplate) -> bool:
    """Whether the template writes these headers, as markers, and nothing behind the last."""
    return (
        template.has_markers("<|start_header_id|>", "<|end_header_id|>", _TURN_END)
        and _USER in template.user_text
        and template.user_text.endswith(_HEADER)
    )
