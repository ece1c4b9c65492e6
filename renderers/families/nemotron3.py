"""Nemotron 3 and 3.5: ChatML, a `<think>` block that the prompt opens, tool calls as XML in `<tool_call>`.

Super and Ultra also take a lower effort. Nano and Super put newlines around `</think>`, the others none.
"""

from renderers.base import RenderError
from renderers.efforts import Efforts
from renderers.families.chatml import HEADER, TAGS, TURN_END, XML_CALL, end_ids, find_efforts
from renderers.families.tagged import TaggedRenderer, changes, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Message, Role, TextPart
from renderers.replies.tags import Framing, TagGrammar
from renderers.replies.xml_calls import parse_xml_call
from renderers.templates.chat_template import PROBE_USER, ChatTemplate

_NAME = "nemotron3"
_LEVELS = {"low": "low_effort", "medium": "medium_effort"}
_NO_REASONING = "<think></think>"
_PROBE_REASONING = Conversation((*PROBE_USER.messages, Message(Role.ASSISTANT, (TextPart("quartz"),), "umber")))


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(_NAME, template)
    tags = needed_tags(_NAME, template, TAGS) | end_ids(_NAME, tokenizer, template)
    around = int(_has_newlines(template))
    framing = Framing(
        after_think_open=1, before_think_close=around, after_think_close=around, before_call=1, after_call=1
    )
    grammar = TagGrammar(tags, parse_xml_call, framing=framing)
    return TaggedRenderer(_NAME, template, headers=[HEADER], grammar=grammar, efforts=_find_efforts(template))


def _has_newlines(template: ChatTemplate) -> bool:
    try:
        return "umber\n</think>\nquartz" in template.render(_PROBE_REASONING).text
    except RenderError:
        return False


def _find_efforts(template: ChatTemplate) -> Efforts:
    levels: Efforts = {
        level: {variable: True} for level, variable in _LEVELS.items() if changes(template, **{variable: True})
    }
    return {**levels, **find_efforts(template)}


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: it writes Qwen3.5's calls, and a closed block before each that has none."""
    return template.has_markers(TURN_END, *TAGS) and f"{_NO_REASONING}\n{XML_CALL}" in template.call_text
