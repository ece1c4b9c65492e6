"""Qwen3 and related models: ChatML, `<think>` blocks, tool calls as JSON in `<tool_call>` (Qwen3, Qwen3-VL, the 2507
models).

The template tells what a model can do. If it closes the think block when thinking is switched off, the model is a
hybrid. If it opens the block, the model always reasons. Otherwise it never does.
"""

from renderers.base import TemplateRefused
from renderers.efforts import Efforts, switch
from renderers.families.qwen2_5 import CALL_FORM, CALL_TAGS, HEADER, TURN_END, end_ids
from renderers.families.tagged import TaggedRenderer, find_start, needed_template
from renderers.markers import Tokenizer
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, Start, Tag, TagGrammar, TextTag
from renderers.templates.chat_template import ChatTemplate

NAME = "qwen3"
TEXT_NAME = "qwen3_text"
TAGS = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE, **CALL_TAGS}
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
    template = needed_template(NAME, template)
    tags = {token_id: tag for spelling, tag in TAGS.items() if (token_id := template.added.id_of(spelling)) is not None}
    ends = dict.fromkeys(end_ids(NAME, tokenizer, template), Tag.END)
    missing = next((spelling for spelling in CALL_TAGS if template.added.id_of(spelling) is None), None)
    if missing is not None:
        raise TemplateRefused(
            f"The renderer {NAME!r} needs the token {missing!r}; {TEXT_NAME!r} finds it in ordinary text."
        )
    grammar = TagGrammar(tags | ends, parse_json_call, framing=_FRAMING)
    return TaggedRenderer(NAME, template, headers=[HEADER], grammar=grammar, efforts=find_efforts(template))


def build_text(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """The same format from a model whose vocabulary lacks the tags. Raises `TemplateRefused`."""
    template = needed_template(TEXT_NAME, template)
    ends = dict.fromkeys(end_ids(TEXT_NAME, tokenizer, template), Tag.END)
    grammar = TagGrammar(ends, parse_json_call, by_text=_TEXT_TAGS, framing=_FRAMING)
    return TaggedRenderer(TEXT_NAME, template, headers=[HEADER], grammar=grammar, efforts=find_efforts(template))


def find_efforts(template: ChatTemplate) -> Efforts:
    """What the template does with `enable_thinking`."""
    switched_on = find_start(template, [HEADER], enable_thinking=True)
    switched_off = find_start(template, [HEADER], enable_thinking=False)
    if switched_on is not switched_off:
        return switch("enable_thinking")
    return {True: {}} if switched_on is not Start.TEXT else {}


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in this form.

    (Qwen3.5 has the same tokens and another form.)
    """
    return template.has_markers(TURN_END, *TAGS) and CALL_FORM in template.call_text
