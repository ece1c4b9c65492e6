"""Mistral: `[INST]` turns, calls behind `[TOOL_CALLS]`, reasoning in `[THINK]`.

Tokenizers up to version 7 write the calls as an array of JSON objects (Nemo, Mistral 7B 0.3, Mistral Large). From
version 11 on each call has its own `[TOOL_CALLS]`, then its name, `[ARGS]` and its arguments. Version 11 alone writes
an id between them, behind `[CALL_ID]`. Nothing but the next call or the end of the reply ends a call.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b

from renderers.base import RenderedPrompt, RenderError
from renderers.deltas import Piece
from renderers.families.tagged import TaggedRenderer, known_ids, known_tags, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Message, Role, TextPart, Tool, ToolCall
from renderers.replies.blocks import texts_between
from renderers.replies.tags import Framing, ParseCalls, Tag, TagGrammar
from renderers.templates.chat_template import PROBE_USER, ChatTemplate
from renderers.tools import NotAnObject, NotJson, dump, named_call, new_call_id, parse_object, parse_value

NAME = "mistral"
_CALLS, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_REASONING = {"[THINK]": Tag.THINK_OPEN, "[/THINK]": Tag.THINK_CLOSE}
_CALL_TAGS = {_CALLS: Tag.CALL_OPEN, _CALL_ID: Tag.CALL_PART, _ARGUMENTS: Tag.CALL_PART}
_ARRAY = re.compile(r"\[TOOL_CALLS\] ?\[")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_ANSWERED = Conversation((*PROBE_USER.messages, Message(Role.ASSISTANT, (TextPart("quartz"),))))


class MistralRenderer(TaggedRenderer):
    """The template tells in which form the model calls, if at all."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(NAME, template)
        parse_calls = _find_form(template)
        tags = known_tags(template, _REASONING if parse_calls is None else _REASONING | _CALL_TAGS)
        ends = dict.fromkeys(known_ids(tokenizer.eos_token_id) | template.turn_end_ids, Tag.END)
        grammar = TagGrammar(
            tags | ends,
            parse_calls or _no_calls,
            framing=Framing(leading_space=_writes_a_space(template)),
            calls_run_on=True,
        )
        super().__init__(
            NAME,
            template,
            headers=[],
            grammar=grammar,
            # No template has a switch. Whether the model reasons is said by its system message.
            efforts={True: {}} if Tag.THINK_OPEN in tags.values() else {},
            supports_tools=parse_calls is not None,
        )

    def render(self, conversation: Conversation) -> RenderedPrompt:
        messages = tuple(map(_with_short_ids, conversation.messages))
        return super().render(replace(conversation, messages=messages))


def recognises(template: ChatTemplate) -> bool:
    """Whether the template writes a user's turn of these markers."""
    return template.has_markers("[INST]", "[/INST]") and "[INST]" in template.user_text


def _find_form(template: ChatTemplate) -> ParseCalls | None:
    if template.added.id_of(_CALLS) is None:
        return None
    if _ARRAY.search(template.call_text):
        return _parse_array
    if f"{_CALLS}judge" in template.call_text and template.added.id_of(_ARGUMENTS) is not None:
        return _parse_named
    return None


def _writes_a_space(template: ChatTemplate) -> bool:
    """Whether an assistant's text begins with a space that is not part of it."""
    try:
        return "[/INST] quartz" in template.render(_ANSWERED).text
    except RenderError:
        return False


def _with_short_ids(message: Message) -> Message:
    """The message with ids as the templates want them: nine letters and digits. Equal ids stay equal."""
    return replace(
        message,
        tool_calls=tuple(replace(call, id=_short(call.id)) for call in message.tool_calls),
        tool_call_id=None if message.tool_call_id is None else _short(message.tool_call_id),
    )


def _short(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:9]


# --- calls ---


def _no_calls(block: Sequence[Piece], tools: Mapping[str, Tool]) -> None:
    """For a model whose template shows no calls, and whose grammar therefore has none."""


def _parse_array(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """`[{"name": "f", "arguments": {…}, "id": "…"}]`; older models write no id."""
    del tools
    try:
        items = parse_value("".join(piece.text for piece in block))
    except NotJson:
        return None
    if not isinstance(items, list) or not items or any(piece.token_id is not None for piece in block):
        return None
    calls = [_call_of(item) for item in items]
    known = [call for call in calls if call is not None]
    return known if len(known) == len(calls) else None


def _call_of(item: object) -> ToolCall | None:
    if not isinstance(item, dict):
        return None
    call = named_call(item)
    return None if call is None else replace(call, id=_own_id(item.get("id")))


def _parse_named(block: Sequence[Piece], tools: Mapping[str, Tool]) -> list[ToolCall] | None:
    """`f[CALL_ID]…[ARGS]{…}`, or without the id."""
    del tools
    marks = [piece.text for piece in block if piece.token_id is not None]
    name, *rest = texts_between(block, marks)
    if marks not in ([_CALL_ID, _ARGUMENTS], [_ARGUMENTS]) or not name:
        return None
    try:
        arguments = parse_object(rest[-1])
    except NotAnObject:
        return None
    call_id = rest[0] if len(marks) == 2 else None
    return [ToolCall(_own_id(call_id), name, dump(arguments))]


def _own_id(call_id: object) -> str:
    """The model's own id, since its template renders it; a new one if it is not one."""
    return call_id if isinstance(call_id, str) and _SHORT_ID.fullmatch(call_id) else new_call_id()
