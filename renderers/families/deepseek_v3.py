"""DeepSeek V3, V3.1 and R1, and the distillations of R1: calls in a section of markers.

The template tells what a model can do. It also tells the form of a call: V3.1 writes `name<sep>{…}`; V3 and R1 write
the word "function", the name, and the arguments in a block of code.
"""

import re
from collections.abc import Mapping, Sequence

from renderers.deltas import Piece
from renderers.families.tagged import (
    TaggedRenderer,
    find_efforts,
    find_start,
    known_ids,
    known_tags,
    needed_id,
    needed_template,
)
from renderers.markers import Tokenizer
from renderers.messages import Tool, ToolCall
from renderers.replies.call_sections import CallMarkers
from renderers.replies.tags import Framing, Start, Tag, TagGrammar
from renderers.templates.chat_template import ChatTemplate
from renderers.tools import NotAnObject, dump, new_call_id, parse_object

NAME = "deepseek_v3"
_HEADERS = ("<｜Assistant｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>")
"""A reply to the result of a call has no header of its own."""
_TURN_END = "<｜end▁of▁sentence｜>"
_CALL = CallMarkers("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_CODE_CALL = CallMarkers(_CALL.begin, _CALL.middle, _CALL.end, between="\n")
_SECTION = _CALL.tags("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_REASONING = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE}
_CODE = re.compile(r"([^\n]+)\n```json\n(.*)\n```", re.DOTALL)


class DeepSeekV3Renderer(TaggedRenderer):
    """A vocabulary may lack the markers of reasoning (V3) or of calls (the distillations)."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(NAME, template)
        tags = known_tags(template, _SECTION | _REASONING)
        ends = known_ids(needed_id(NAME, template, _TURN_END), tokenizer.eos_token_id)
        # R1 writes `<think>\n…\n</think>\n\n`, V3.1 no newlines.
        in_lines = find_start(template, _HEADERS) is Start.REASONING
        grammar = TagGrammar(
            tags | dict.fromkeys(ends, Tag.END),
            _parse_code_calls if "judge\n```json\n" in template.call_text else _parse_calls,
            framing=Framing(after_think_open=1, before_think_close=1, after_think_close=2) if in_lines else Framing(),
            must_close_reasoning=True,
            calls_come_last=True,
        )
        efforts = find_efforts(template, _HEADERS, "thinking")
        super().__init__(NAME, template, headers=_HEADERS, grammar=grammar, efforts=efforts)
        self.supports_tools = _writes_sections(template)


def _parse_calls(section: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    del tools
    return _calls(_CALL.split(section))


def _parse_code_calls(section: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    del tools
    calls = []
    for kind, code in _CODE_CALL.split(section) or ():
        found = _CODE.fullmatch(code)
        if kind != "function" or found is None:
            return None
        calls.append((found[1], found[2]))
    return _calls(calls)


def _calls(calls: Sequence[tuple[str, str]] | None) -> list[ToolCall] | None:
    made = []
    for name, arguments in calls or ():
        try:
            made.append(ToolCall(new_call_id(), name, dump(parse_object(arguments))))
        except NotAnObject:
            return None
        if not name:
            return None
    return made or None


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its template writes calls in this form, or it reasons.

    (The templates of the distillations leave calls out.)
    """
    if not template.has_markers("<｜User｜>", "<｜Assistant｜>", _TURN_END):
        return False
    return _writes_sections(template) or find_start(template, _HEADERS) is not Start.TEXT


def _writes_sections(template: ChatTemplate) -> bool:
    return template.has_markers(*_SECTION) and "<｜tool▁calls▁begin｜>" in template.call_text
