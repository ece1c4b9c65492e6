"""Qwen3 and related models: ChatML, `<think>` blocks, tool calls as JSON in `<tool_call>` (Qwen3, Qwen3-VL, the 2507
models).

The template tells what a model can do. If it closes the think block when thinking is switched off, the model is a
hybrid. If it opens the block, the model always reasons. Otherwise it never does.
"""

from renderers.base import TemplateRefused
from renderers.families.chatml import CALL_TAGS, HEADER, JSON_CALL, TAGS, TURN_END, end_ids, find_efforts
from renderers.families.tagged import TaggedRenderer, known_tags, needed_template
from renderers.markers import Tokenizer
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, Tag, TagGrammar, TextTag
from renderers.templates.chat_template import ChatTemplate

_NAME = "qwen3"
_TEXT_NAME = "qwen3_text"
_FRAMING = Framing(after_think_open=1, before_think_close=1, after_think_close=2, before_call=1)
_TEXT_TAGS = {
    "<think>": TextTag(Tag.THINK_OPEN, followed_by="\n"),
    "</think>": TextTag(Tag.THINK_CLOSE, followed_by="\n"),
    "<tool_call>": TextTag(Tag.CALL_OPEN, followed_by="\n{"),
    "</tool_call>": TextTag(Tag.CALL_CLOSE, followed_by=""),
}


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """The tags are markers of the vocabulary; without those of reasoning a model never reasons. Raises
    `TemplateRefused`.
    """
    template = needed_template(_NAME, template)
    missing = next((spelling for spelling in CALL_TAGS if not template.has_markers(spelling)), None)
    if missing is not None:
        raise TemplateRefused(
            f"The renderer {_NAME!r} needs the token {missing!r}; {_TEXT_NAME!r} finds it in ordinary text."
        )
    tags = known_tags(template, TAGS)
    grammar = TagGrammar(tags | end_ids(_NAME, tokenizer, template), parse_json_call, framing=_FRAMING)
    return TaggedRenderer(_NAME, template, headers=[HEADER], grammar=grammar, efforts=find_efforts(template))


def build_text(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """The same format from a model whose vocabulary lacks the tags. Raises `TemplateRefused`."""
    template = needed_template(_TEXT_NAME, template)
    ends = end_ids(_TEXT_NAME, tokenizer, template)
    grammar = TagGrammar(ends, parse_json_call, by_text=_TEXT_TAGS, framing=_FRAMING)
    return TaggedRenderer(_TEXT_NAME, template, headers=[HEADER], grammar=grammar, efforts=find_efforts(template))


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in this form.

    (Qwen3.5 has the same tokens and another form.)
    """
    return template.has_markers(TURN_END, *TAGS) and JSON_CALL in template.call_text
