"""Qwen2.5: ChatML, tool calls as JSON in `<tool_call>`, no reasoning."""

from renderers.families.tagged import TaggedRenderer, known_ids, needed_id, needed_template
from renderers.markers import Tokenizer
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, Tag, TagGrammar
from renderers.templates.chat_template import ChatTemplate

NAME = "qwen2_5"
HEADER = "<|im_start|>assistant\n"
TURN_END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
CALL_TAGS = {"<tool_call>": Tag.CALL_OPEN, "</tool_call>": Tag.CALL_CLOSE}
CALL_FORM = '<tool_call>\n{"name": "judge", "arguments": {"stone": "onyx"}}\n</tool_call>'
"""What the template makes of `PROBE_CALL`."""


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(NAME, template)
    ends = end_ids(NAME, tokenizer, template)
    tags = {needed_id(NAME, template, spelling): tag for spelling, tag in CALL_TAGS.items()}
    grammar = TagGrammar(tags | dict.fromkeys(ends, Tag.END), parse_json_call, framing=Framing(before_call=1))
    return TaggedRenderer(NAME, template, headers=[HEADER], grammar=grammar, efforts={})


def end_ids(name: str, tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """The end tokens of every ChatML family. Raises `TemplateRefused`."""
    return known_ids(needed_id(name, template, TURN_END), template.added.id_of(TEXT_END), tokenizer.eos_token_id)


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its template writes calls in this form, its vocabulary has no `<think>`."""
    return (
        template.added.id_of("<think>") is None
        and template.has_markers(TURN_END, *CALL_TAGS)
        and CALL_FORM in template.call_text
    )
