"""Inkling: every part of a turn is a message of its own, `<|message_model|><|content_text|>…<|end_message|>`.

No chat template is published, so a prompt is written here. As with templates, only what is written here is trusted: no
text of a caller becomes a marker.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile

from renderers.base import RenderedPrompt, RenderError, TemplateRefused
from renderers.markers import AddedTokens, Tokenizer, added_tokens
from renderers.messages import Conversation, Effort, Message, Role, TextPart, Tool, ToolCall
from renderers.replies.framed import Body, FramedParser, FrameGrammar, Header, Mark, Part
from renderers.templates.chat_template import ChatTemplate
from renderers.templates.encoder import PromptEncoder
from renderers.templates.provenance import TracedText
from renderers.tools import NotAnObject, dump, new_call_id, parse_object

_AUTHORS = {
    Role.SYSTEM: "<|message_system|>",
    Role.USER: "<|message_user|>",
    Role.ASSISTANT: "<|message_model|>",
    Role.TOOL: "<|message_tool|>",
}
_MODEL = _AUTHORS[Role.ASSISTANT]
_TEXT, _THINKING, _CALL = "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"
_TOOLS = "<|content_xml|>"
_END_MESSAGE = "<|end_message|>"
_END_TURN = "<|content_model_end_sampling|>"
_NEEDED = (*_AUTHORS.values(), _TEXT, _THINKING, _CALL, _TOOLS, _END_MESSAGE, _END_TURN)

_EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}
_DEFAULT_EFFORT, _MAX_EFFORT = 0.9, 0.99

_MAX_NAME_LEN = 256


class InklingRenderer:
    """Reasoning of earlier turns is kept. The effort stands behind the system messages that come first."""

    name = "inkling"
    supports_tools = True
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        del template  # this family has none
        added = added_tokens(tokenizer.backend_tokenizer)
        missing = next((marker for marker in _NEEDED if added.id_of(marker) is None), None)
        if missing is not None:
            raise TemplateRefused(f"The renderer {self.name!r} needs the special token {missing!r}.")
        self._encoder = PromptEncoder(tokenizer.backend_tokenizer, added)
        ids = {marker: token_id for marker in _NEEDED if (token_id := added.id_of(marker)) is not None}
        self.stop_token_ids = frozenset([ids[_END_TURN]])
        self._bodies = {ids[_TEXT]: _TEXT, ids[_THINKING]: _THINKING, ids[_CALL]: _CALL}
        self._marks = {
            ids[_MODEL]: Mark.OPEN,
            **dict.fromkeys(self._bodies, Mark.BODY),
            ids[_END_MESSAGE]: Mark.CLOSE,
            ids[_END_TURN]: Mark.END,
        }

    def check_effort(self, effort: Effort | None) -> None:
        _effort_level(effort)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        text = TracedText("", b"").join(_written(conversation))
        return RenderedPrompt(tuple(self._encoder.encode(text)))

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> FramedParser:
        names = frozenset(tool.name for tool in tools)
        return FramedParser(
            FrameGrammar(
                by_id=self._marks,
                opened=False,
                end_closes=False,
                may_become=partial(_may_become_header, names),
                begins_call=_begins_call,
                read=partial(self._read_header, names),
            )
        )

    def _read_header(self, names: frozenset[str], header: Header) -> Body | None:
        kind, name = self._bodies[header.ids[-1]], header.texts[0]
        if len(header.ids) > 1 or (name == "") is (kind == _CALL):
            return None
        if kind == _CALL:
            return partial(_parse_call, name) if name in names else Part.QUOTED
        return Part.TEXT if kind == _TEXT else Part.REASONING


def recognises(added: AddedTokens) -> bool:
    """Whether a vocabulary is this family's."""
    return all(added.id_of(marker) is not None for marker in _NEEDED)


# --- a conversation as text ---


def _written(conversation: Conversation) -> Iterator[str]:
    effort = _effort_level(conversation.effort)
    messages = conversation.messages
    num_leading = sum(1 for _ in takewhile(lambda message: message.role is Role.SYSTEM, messages))
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for index, message in enumerate(messages[:num_leading]):
        yield from _message(message, names, index)
    if conversation.tools:
        declared = json.dumps(
            [_declaration(tool) for tool in conversation.tools],
            ensure_ascii=False,
            separators=(",", ":"),
            sort_keys=True,
        )
        yield from _part(Role.SYSTEM, "tool_declare", _TOOLS, declared)
    yield from _part(Role.SYSTEM, "", _TEXT, f"Thinking effort level: {effort}")
    for index, message in enumerate(messages[num_leading:], start=num_leading):
        yield from _message(message, names, index)


def _message(message: Message, names: Mapping[str, str], index: int) -> Iterator[str]:
    if message.reasoning is not None:
        yield from _part(message.role, "", _THINKING, message.reasoning)
    name = _result_name(message, names, index) if message.role is Role.TOOL else ""
    if not (message.tool_calls and not message.text):  # an empty text beside calls is no part
        for part in message.content or ():
            if not isinstance(part, TextPart):
                raise RenderError(f"messages[{index}]: this model takes no images.")
            yield from _part(message.role, name, _TEXT, part.text)
    for number, call in enumerate(message.tool_calls):
        yield from _part(Role.ASSISTANT, call.name, _CALL, _call_body(call, f"messages[{index}].tool_calls[{number}]"))
    if message.role is Role.ASSISTANT:
        yield TracedText.trusted(_END_TURN)


def _part(role: Role, name: str, kind: str, text: str) -> tuple[str, ...]:
    """One message. `name` and `text` are a caller's: never trusted."""
    trusted = TracedText.trusted
    return trusted(_AUTHORS[role]), name, trusted(kind), text, trusted(_END_MESSAGE)


def _result_name(message: Message, names: Mapping[str, str], index: int) -> str:
    name = message.name or names.get(message.tool_call_id or "")
    if name is None:
        raise RenderError(f"messages[{index}].tool_call_id is of no call before it, got {message.tool_call_id!r}.")
    return name


def _declaration(tool: Tool) -> dict[str, object]:
    description = tool.declared["function"].get("description") or ""
    return {"type": "function", "name": tool.name, "description": description, "parameters": tool.parameters}


def _call_body(call: ToolCall, path: str) -> str:
    try:
        arguments = parse_object(call.arguments)
    except NotAnObject as exc:
        field = f"{path}.function.arguments"
        raise RenderError(f"{field} must be the text of a JSON object: {exc}.", field) from exc
    body = {"name": call.name, "args": dict(sorted(arguments.items()))}
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def _effort_level(effort: Effort | None) -> str:
    """With two decimals at most. Raises `RenderError`."""
    if isinstance(effort, str) and effort in _EFFORTS:
        number = _EFFORTS[effort]
    elif isinstance(effort, int | float) and not isinstance(effort, bool) and 0 <= effort <= _MAX_EFFORT:
        number = effort
    elif effort is None:
        number = _DEFAULT_EFFORT
    else:
        raise RenderError(
            f"reasoning_effort: this model takes {', '.join(_EFFORTS)} or a number from 0.0 to {_MAX_EFFORT}, "
            f"got {effort!r}.",
            "reasoning_effort",
        )
    # Thousandths first, as in the model's own tools: 0.015 is 0.02, whatever its binary value.
    return f"{round(round(number * 1000) / 10) / 100:g}"


# --- a reply ---


def _may_become_header(names: frozenset[str], header: Header) -> bool:
    """A name has no spaces, unless a declared one does."""
    if header.ids:
        return False
    text = header.texts[0]
    return (len(text) <= _MAX_NAME_LEN and not any(map(str.isspace, text))) or any(
        name.startswith(text) for name in names
    )


def _begins_call(header: Header) -> bool:
    return header.texts[0] != ""


def _parse_call(name: str, body: str) -> ToolCall | None:
    """`{"name": …, "args": {…}}` and nothing else, with the name of the header."""
    try:
        call = parse_object(body)
    except NotAnObject:
        return None
    arguments = call.get("args")
    if call.keys() != {"name", "args"} or call["name"] != name or not isinstance(arguments, dict):
        return None
    return ToolCall(new_call_id(), name, dump(arguments))
