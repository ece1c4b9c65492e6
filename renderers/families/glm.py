"""GLM-4.5 and later: roles without end tokens, `<think>` blocks, calls whose arguments stand between markers of their
own.

The turn ends where the next role would begin. Text and reasoning are stripped, as the templates strip them in a
history. A model whose template writes an effort always reasons; the others are hybrids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from renderers.base import RenderedPrompt, RenderError
from renderers.deltas import Piece
from renderers.efforts import Efforts
from renderers.families.tagged import TaggedRenderer, find_switch, known_ids, needed_id, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Message, Role, Tool, ToolCall
from renderers.replies.arguments import value_of
from renderers.replies.blocks import texts_between
from renderers.replies.tags import STRIPPED, Tag, TagGrammar
from renderers.templates.chat_template import PROBE_USER, ChatTemplate
from renderers.tools import dump, new_call_id

NAME = "glm"
_HEADER = "<|assistant|>"
_ENDS = ("<|user|>", "<|observation|>")
_ARGUMENT = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""The markers of one argument, in their order."""
_TAGS = {
    "<think>": Tag.THINK_OPEN,
    "</think>": Tag.THINK_CLOSE,
    "<tool_call>": Tag.CALL_OPEN,
    "</tool_call>": Tag.CALL_CLOSE,
    **dict.fromkeys(_ARGUMENT, Tag.CALL_PART),
}
_LEVELS = ("low", "high", "max")


class _GlmRenderer(TaggedRenderer):
    """The result of a call is rendered without id or name: only the order says whose it is."""

    def render(self, conversation: Conversation) -> RenderedPrompt:
        return super().render(replace(conversation, messages=_results_in_call_order(conversation.messages)))


def build(tokenizer: Tokenizer, template: ChatTemplate | None) -> TaggedRenderer:
    """Raises `TemplateRefused`."""
    template = needed_template(NAME, template)
    tags = needed_tags(NAME, template, _TAGS)
    ends = known_ids(
        *(needed_id(NAME, template, spelling) for spelling in _ENDS),
        template.added.id_of("<|endoftext|>"),
        tokenizer.eos_token_id,
    )
    grammar = TagGrammar(tags | dict.fromkeys(ends, Tag.END), _parse_call, framing=STRIPPED)
    return _GlmRenderer(NAME, template, headers=[_HEADER], grammar=grammar, efforts=_find_efforts(template))


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its template writes the arguments of a call between its own markers."""
    key, end_key, value, end_value = _ARGUMENT
    argument = f"{key}stone{end_key}", f"{value}onyx{end_value}"
    return template.has_markers(_HEADER, *_ENDS, *_TAGS) and all(part in template.call_text for part in argument)


def _results_in_call_order(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Results that follow each other stand in the order of their calls, where their ids say so."""
    ordered: list[Message] = []
    places: dict[str | None, int] = {}
    for is_result, run in groupby(messages, lambda message: message.role is Role.TOOL):
        turns = list(run)
        if is_result and all(turn.tool_call_id in places for turn in turns):
            turns.sort(key=lambda turn: places[turn.tool_call_id])
        places = {call.id: place for place, call in enumerate(turns[-1].tool_calls)}
        ordered += turns
    return tuple(ordered)


def _find_efforts(template: ChatTemplate) -> Efforts:
    levels = [level for level in _LEVELS if _writes_level(template, level)]
    if levels:
        return {level: {"reasoning_effort": level} for level in levels}
    return find_switch(template, [_HEADER], "enable_thinking")


def _writes_level(template: ChatTemplate, level: str) -> bool:
    try:
        text = template.render(PROBE_USER, reasoning_effort=level).text
    except RenderError:
        return False
    return f"Reasoning Effort: {level.capitalize()}" in text


def _parse_call(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """`name<arg_key>…</arg_key><arg_value>…</arg_value>…`, with space between the parts at most."""
    name, *texts = texts_between(block, _ARGUMENT)
    markers = tuple(piece.text for piece in block if piece.token_id is not None and piece.text in _ARGUMENT)
    keys, values = texts[::4], texts[2::4]
    between = texts[1::2]
    name = name.strip()
    well_formed = markers == _ARGUMENT * (len(markers) // 4) and not any(map(str.strip, between))
    if not name or not well_formed or "" in keys:
        return None
    arguments = {key: value_of(text, key, tools.get(name)) for key, text in zip(keys, values, strict=True)}
    return [ToolCall(new_call_id(), name, dump(arguments))]
