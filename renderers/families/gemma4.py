"""Gemma 4: reasoning in the channel `thought`, calls in a notation of their own.

A call is `call:f{city:<|"|>Köln<|"|>,days:3}`: keys are bare, strings stand between two markers, all else is as in
JSON. After its calls the model begins a result itself, and a reply ends there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from renderers.base import RenderError
from renderers.deltas import Piece
from renderers.efforts import Efforts, switch
from renderers.families.tagged import TaggedRenderer, known_ids, needed_id, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Tool, ToolCall
from renderers.replies.blocks import texts_between
from renderers.replies.tags import Framing, Tag, TagGrammar
from renderers.templates.chat_template import PROBE_USER, ChatTemplate
from renderers.tools import NotAnObject, dump, new_call_id, parse_object

NAME = "gemma4"
_TURN_END, _RESULT, _RESULT_END = "<turn|>", "<|tool_response>", "<tool_response|>"
_THINK_OPEN, _THINK_CLOSE = "<|channel>", "<channel|>"
_QUOTE = '<|"|>'
_TAGS = {
    _THINK_OPEN: Tag.THINK_OPEN,
    _THINK_CLOSE: Tag.THINK_CLOSE,
    "<|tool_call>": Tag.CALL_OPEN,
    "<tool_call|>": Tag.CALL_CLOSE,
    _QUOTE: Tag.CALL_PART,
}
_LABEL = "thought"
_HEADER = "<|turn>model\n"
_CALL_FORM = f"<|tool_call>call:judge{{stone:{_QUOTE}onyx{_QUOTE}}}<tool_call|>"
_CALL = re.compile(r"call:([^{]+)(\{.*)", re.DOTALL)
_STRUCTURE = re.compile(r"([{}\[\],:])")


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(NAME, template)
    tags = needed_tags(NAME, template, _TAGS)
    ends = known_ids(
        needed_id(NAME, template, _TURN_END),
        needed_id(NAME, template, _RESULT),
        template.added.id_of("<eos>"),
        tokenizer.eos_token_id,
    )
    grammar = TagGrammar(
        tags | dict.fromkeys(ends, Tag.END),
        parse_call,
        framing=Framing(after_think_open=1, before_think_close=1),
        text_in_reasoning=frozenset((Tag.CALL_PART,)),
        reasoning_label=_LABEL,
    )
    return TaggedRenderer(
        NAME,
        template,
        headers=[_HEADER, _RESULT_END],
        grammar=grammar,
        efforts=_find_efforts(template),
        think_tags=(_THINK_OPEN + _LABEL, _THINK_CLOSE),
    )


def recognises(template: ChatTemplate) -> bool:
    """Whether the vocabulary has the tokens, and the template writes calls in this form."""
    return template.has_markers(_TURN_END, _RESULT, *_TAGS) and _CALL_FORM in template.call_text


def _find_efforts(template: ChatTemplate) -> Efforts:
    try:
        on, off = (template.render(PROBE_USER, enable_thinking=value).text for value in (True, False))
    except RenderError:
        return {}
    return switch("enable_thinking") if on != off else {}


# --- calls ---


def parse_call(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """The types of the arguments are those that the model writes: the declaration changes none."""
    del tools
    outside, *rest = texts_between(block, {_QUOTE})  # outside of strings and inside, in turns
    found = _CALL.fullmatch(outside)
    if found is None or len(rest) % 2:
        return None
    try:
        arguments = parse_object("".join(_as_json([found[2], *rest])))
    except NotAnObject:
        return None
    return [ToolCall(new_call_id(), found[1], dump(arguments))]


def _as_json(texts: Sequence[str]) -> Iterator[str]:
    for index, text in enumerate(texts):
        if index % 2:
            yield dump(text)
        else:
            yield from _structure_as_json(text)


def _structure_as_json(text: str) -> Iterator[str]:
    """Braces, brackets, commas and colons, and the bare words between them. Raises `NotAnObject`."""
    parts = _STRUCTURE.split(text)
    for word, mark in zip(parts[::2], [*parts[1::2], ""], strict=True):
        bare = word.strip()
        if mark == ":" and bare:
            yield dump(bare)
        elif '"' in bare:
            raise NotAnObject("a string stands between markers")
        else:
            yield "null" if bare == "None" else bare  # older templates write null as Python does
        yield mark
