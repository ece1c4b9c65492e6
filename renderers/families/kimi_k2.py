"""Kimi K2, K2-Thinking, K2.5 and K2.6: calls in a section of their own, whose ids the model numbers itself.

The template tells what a model can do: whether an argument switches reasoning off, and what a prompt begins of the
reply. What the tokenizers of the model repositories prepare for the template is made here, without their code: tools
with sorted keys, and their TypeScript declaration.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from renderers.base import RenderedPrompt, RenderError
from renderers.deltas import Piece
from renderers.families.kimi_tools import typescript, with_sorted_keys
from renderers.families.tagged import (
    TaggedRenderer,
    find_switch,
    known_ids,
    known_tags,
    needed_id,
    needed_tags,
    needed_template,
)
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Effort, Tool, ToolCall
from renderers.replies.call_sections import CallMarkers
from renderers.replies.tags import Tag, TagGrammar
from renderers.templates.chat_template import ChatTemplate
from renderers.tools import NotAnObject, dump, parse_object

NAME = "kimi_k2"
_HEADER = "<|im_assistant|>assistant<|im_middle|>"
_TURN_END = "<|im_end|>"
_CALL = CallMarkers("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_SECTION = _CALL.tags("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_REASONING = {"<think>": Tag.THINK_OPEN, "</think>": Tag.THINK_CLOSE}
_ID = re.compile(r"functions\.(.+):\d+", re.DOTALL)


class KimiK2Renderer(TaggedRenderer):
    """Without the tokens of reasoning a model never reasons."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(NAME, template)
        tags = needed_tags(NAME, template, _SECTION) | known_tags(template, _REASONING)
        ends = known_ids(needed_id(NAME, template, _TURN_END), tokenizer.eos_token_id)
        grammar = TagGrammar(
            tags | dict.fromkeys(ends, Tag.END),
            _parse_calls,
            text_in_reasoning=frozenset(_SECTION.values()),
            calls_come_last=True,
        )
        efforts = find_switch(template, [_HEADER], "thinking")
        super().__init__(NAME, template, headers=[_HEADER], grammar=grammar, efforts=efforts)
        self._always_reasons = not efforts and "<think>" in template.call_text

    def check_effort(self, effort: Effort | None) -> None:
        if self._always_reasons and effort is not None:
            raise RenderError(
                f"reasoning_effort must be left out: this model always reasons, got {effort!r}.", "reasoning_effort"
            )
        super().check_effort(effort)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        tools = tuple(replace(tool, declared=with_sorted_keys(tool.declared)) for tool in conversation.tools)
        return super().render(replace(conversation, tools=tools))

    def variables(self, conversation: Conversation) -> Mapping[str, object]:
        declaration = typescript(conversation.tools)
        variables = super().variables(conversation)
        return variables if declaration is None else {**variables, "tools_ts_str": declaration}


def _parse_calls(section: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """Each call keeps the id that the model gave it: the template renders it, and the model goes on counting."""
    del tools
    calls = []
    for call_id, arguments in _CALL.split(section) or ():
        name = _ID.fullmatch(call_id)
        try:
            parsed = parse_object(arguments)
        except NotAnObject:
            return None
        if name is None:
            return None
        calls.append(ToolCall(call_id, name[1], dump(parsed)))
    return calls or None


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template writes calls in this form."""
    return template.has_markers(_TURN_END, *_SECTION) and f'{_CALL.middle}{{"stone": "onyx"}}' in template.call_text
