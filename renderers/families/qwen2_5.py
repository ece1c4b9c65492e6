"""Qwen2.5: ChatML, tool calls as JSON in `<tool_call>`, no reasoning."""

from renderers.families.chatml import CALL_TAGS, HEADER, JSON_CALL, TURN_END, end_ids
from renderers.families.tagged import TaggedRenderer, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, TagGrammar
from renderers.templates.chat_template import ChatTemplate

_NAME = "qwen2_5"


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(_NAME, template)
    tags = needed_tags(_NAME, template, CALL_TAGS) | end_ids(_NAME, tokenizer, template)
    grammar = TagGrammar(tags, parse_json_call, framing=Framing(before_call=1))
    return TaggedRenderer(_NAME, template, headers=[HEADER], grammar=grammar, efforts={})


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its template writes calls in this form, its vocabulary has no `<think>`."""
    can_call = template.has_markers(TURN_END, *CALL_TAGS) and JSON_CALL in template.call_text
    return can_call and not template.has_markers("<think>")
