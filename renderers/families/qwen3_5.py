"""Qwen3.5, 3.6 and 3.8: ChatML, a `<think>` block that the prompt opens, tool calls as XML in `<tool_call>`.

Qwen3.8 also takes how much to reason.
"""

from renderers.efforts import Efforts
from renderers.families.chatml import HEADER, TAGS, TURN_END, XML_CALL, end_ids, find_efforts
from renderers.families.tagged import TaggedRenderer, changes, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.replies.tags import Framing, TagGrammar
from renderers.replies.xml_calls import parse_xml_call
from renderers.templates.chat_template import ChatTemplate

_NAME = "qwen3_5"
_FRAMING = Framing(after_think_open=1, before_think_close=1, after_think_close=2, before_call=2)
_LEVELS = ("low", "medium", "xhigh")


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(_NAME, template)
    tags = needed_tags(_NAME, template, TAGS) | end_ids(_NAME, tokenizer, template)
    grammar = TagGrammar(tags, parse_xml_call, framing=_FRAMING)
    return TaggedRenderer(_NAME, template, headers=[HEADER], grammar=grammar, efforts=_find_efforts(template))


def _find_efforts(template: ChatTemplate) -> Efforts:
    levels: Efforts = {level: {"reasoning_effort": level} for level in _LEVELS}
    return {**(levels if changes(template, reasoning_effort="low") else {}), **find_efforts(template)}


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family. (Nemotron writes the same calls, behind `<think></think>`.)"""
    return template.has_markers(TURN_END, *TAGS) and XML_CALL in template.call_text
