"""gpt-oss: the harmony format, in which every message has a channel, and calls go to a recipient `functions.name`.

The model's template takes less than the API: one call a turn, one system message, either text or reasoning beside a
call, and tools with a description. A conversation is brought into this form first, so that nothing of it is lost.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

from renderers.base import RenderedPrompt, RenderError
from renderers.efforts import Efforts, check_effort
from renderers.families.tagged import known_ids, needed_id, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation, Effort, Message, Role, TextPart, Tool, ToolCall
from renderers.replies.framed import Body, FramedParser, FrameGrammar, Header, Mark, Part
from renderers.templates.chat_template import ChatTemplate
from renderers.templates.provenance import TracedText
from renderers.tools import NotAnObject, dump, new_call_id, parse_object

_MARKS = {"<|start|>": Mark.OPEN, "<|message|>": Mark.BODY, "<|end|>": Mark.CLOSE}
_ENDS = ("<|return|>", "<|call|>")
_CHANNEL, _CONSTRAIN = "<|channel|>", "<|constrain|>"
_NEEDED = (*_MARKS, *_ENDS, _CHANNEL, _CONSTRAIN)
_EFFORTS: Efforts = {effort: {"reasoning_effort": effort} for effort in ("low", "medium", "high")}

_ROLE = "assistant"
_MAX_RECIPIENT_LEN = 300
_RECIPIENT = re.compile(r"(?: to=(\S+))? ?")
_RECIPIENT_BEGUN = re.compile(rf" ?(?:t|to|to=\S{{0,{_MAX_RECIPIENT_LEN}}} ?)?")
_CHANNEL_AND_MORE = re.compile(r" ?(\w+)(?: to=(\S+))?(?: [\w-]+)? ?")
"""The channel, the recipient if it was not said before, and the type of the content (`json`, `code`)."""
_CHANNEL_BEGUN = re.compile(rf"[^\n]{{0,{_MAX_RECIPIENT_LEN}}}")
_FUNCTION = "functions."
_PREAMBLE = TracedText.trusted("<|end|><|start|>assistant<|channel|>commentary<|message|>")


class GptOssRenderer:
    """Reasoning is the channel `analysis`; text is `final`, `commentary` without a recipient, and any other channel."""

    name = "gpt_oss"
    supports_tools = True
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(self.name, template)
        ids = {spelling: needed_id(self.name, template, spelling) for spelling in _NEEDED}
        ends = (*(ids[spelling] for spelling in _ENDS), template.added.id_of("<|endoftext|>"), tokenizer.eos_token_id)
        self.stop_token_ids = known_ids(*ends)
        self._template = template
        self._header_ids = [ids[_CHANNEL], ids[_CONSTRAIN]]
        marks = {ids[spelling]: mark for spelling, mark in _MARKS.items()}
        self._marks = marks | dict.fromkeys(self.stop_token_ids, Mark.END)

    def check_effort(self, effort: Effort | None) -> None:
        check_effort(effort, _EFFORTS)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        variables = {} if conversation.effort is None else _EFFORTS[conversation.effort]
        rendered = self._template.render(_as_template_takes_it(conversation), **variables)
        return RenderedPrompt(rendered.token_ids)

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> FramedParser:
        return FramedParser(
            FrameGrammar(
                by_id=self._marks,
                opened=True,
                end_closes=True,
                may_become=self._may_become_header,
                begins_call=_begins_call,
                read=partial(self._read_header, frozenset(tool.name for tool in tools)),
            )
        )

    def _may_become_header(self, header: Header) -> bool:
        if header.ids != self._header_ids[: len(header.ids)]:
            return False
        if header.ids:
            return _CHANNEL_BEGUN.fullmatch(header.texts[-1]) is not None
        role = "" if header.is_first else _ROLE
        text = header.texts[0]
        return role.startswith(text) or _RECIPIENT_BEGUN.fullmatch(text.removeprefix(role)) is not None

    def _read_header(self, names: frozenset[str], header: Header) -> Body | None:
        ids = header.ids[:-1]  # the last is the BODY
        role = "" if header.is_first else _ROLE
        before = _RECIPIENT.fullmatch(header.texts[0].removeprefix(role))
        after = _CHANNEL_AND_MORE.fullmatch(header.texts[1])
        has_channel = ids in (self._header_ids[:1], self._header_ids) and header.texts[0].startswith(role)
        if before is None or after is None or not has_channel:
            return None
        channel, recipient = after[1], before[1] or after[2]
        if recipient is None:
            return Part.REASONING if channel == "analysis" else Part.TEXT
        function = recipient.removeprefix(_FUNCTION)
        if function == recipient or function not in names:
            return Part.QUOTED
        return partial(_parse_call, function)


def recognises(template: ChatTemplate) -> bool:
    """Whether a model is of this family: its vocabulary has the tokens, and its template addresses calls so."""
    text = template.call_text
    return template.has_markers(*_NEEDED) and f"to={_FUNCTION}judge" in text and text.endswith(f"<|start|>{_ROLE}")


def _begins_call(header: Header) -> bool:
    return any("to=" in text for text in header.texts)


def _parse_call(name: str, body: str) -> ToolCall | None:
    try:
        arguments = parse_object(body)
    except NotAnObject:
        return None
    return ToolCall(new_call_id(), name, dump(arguments))


# --- a conversation in the form that the template takes ---


def _as_template_takes_it(conversation: Conversation) -> Conversation:
    leading = list(takewhile(lambda message: message.role is Role.SYSTEM, conversation.messages))
    rest = conversation.messages[len(leading) :]
    _check_order(rest, len(leading))
    if len(leading) > 1:
        leading = [replace(leading[0], content=(TextPart("\n\n".join(message.text for message in leading)),))]
    turns = map(_with_preamble, _one_call_a_turn(rest))
    return replace(conversation, messages=(*leading, *turns), tools=tuple(map(_described, conversation.tools)))


def _check_order(messages: Sequence[Message], start: int) -> None:
    """Refuses what the template would leave out, or give the name of another function. Raises `RenderError`."""
    called: frozenset[str] = frozenset()
    for index, message in enumerate(messages, start):
        if message.role is Role.SYSTEM:
            raise RenderError(f"messages[{index}]: this model takes system messages only before all others.")
        if message.role is Role.TOOL and message.tool_call_id not in called:
            raise RenderError(
                f"messages[{index}].tool_call_id must be of a call in the turn before it, got {message.tool_call_id!r}."
            )
        if message.role is not Role.TOOL:
            called = frozenset(call.id for call in message.tool_calls)


def _one_call_a_turn(messages: Sequence[Message]) -> list[Message]:
    """A turn of several calls as several turns, each before its own results: the template names a result by the call
    before it.
    """
    turns: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.tool_calls) < 2:
            turns.append(message)
            continue
        results = list(takewhile(lambda message: message.role is Role.TOOL, messages[index:]))
        index += len(results)
        turns += _separated(message, results)
    return turns


def _separated(message: Message, results: Sequence[Message]) -> list[Message]:
    first, *others = message.tool_calls
    calls = [replace(message, tool_calls=(first,))]
    calls += [Message(Role.ASSISTANT, None, tool_calls=(call,)) for call in others]
    results_of: dict[str | None, list[Message]] = {}
    for result in results:
        results_of.setdefault(result.tool_call_id, []).append(result)
    return [each for turn in calls for each in (turn, *results_of.pop(turn.tool_calls[0].id, ()))]


def _with_preamble(message: Message) -> Message:
    """Beside a call the template takes reasoning or text. Both become what the model itself writes: reasoning, then a
    message in the channel `commentary`, whose markers are ours.
    """
    if not (message.tool_calls and message.reasoning and message.text):
        return message
    return replace(message, content=None, reasoning=message.reasoning + _PREAMBLE + message.text)


def _described(tool: Tool) -> Tool:
    function: Mapping[str, object] = tool.declared["function"]
    if function.get("description") is not None:
        return tool
    return replace(tool, declared={**tool.declared, "function": {**function, "description": ""}})
