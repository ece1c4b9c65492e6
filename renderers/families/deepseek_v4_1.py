"""DeepSeek V4.1: like V4, with an effort in numbers. No template is published, so prompts are written here."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from renderers.base import RenderedPrompt, RenderError, TemplateRefused
from renderers.efforts import Efforts, check_effort
from renderers.families.tagged import known_ids
from renderers.markers import AddedTokens, Tokenizer, added_tokens
from renderers.messages import Conversation, Effort, Message, Role, TextPart, Tool, ToolCall
from renderers.replies.dsml import MARKER, DsmlForm, DsmlLexer, dsml_grammar
from renderers.replies.lexed import LexedParser
from renderers.replies.tags import Start, TagParser
from renderers.templates.chat_template import ChatTemplate
from renderers.templates.encoder import PromptEncoder
from renderers.templates.provenance import TracedText
from renderers.tools import NotAnObject, dump, parse_object

NAME = "deepseek_v4_1"
_BEGINNING, _TURN_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_SYSTEM, _USER, _ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
_MARKERS = (_BEGINNING, _TURN_END, _SYSTEM, _USER, _ASSISTANT, MARKER, "<think>", "</think>")
_FORM = DsmlForm("calls", indent=" ")
_BUDGETS = {"low": 50, "high": 75, "max": 100}
_DEFAULT = "high"
_EFFORTS: Efforts = {"low": {}, "high": {}, "max": {}, True: {}, False: {}, "none": {}}

_OPEN, _CLOSE = f"<{MARKER} ", f"</{MARKER} "
_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"{_OPEN}calls>" block like the following:

{_OPEN}calls>
{_OPEN}invoke name="$TOOL_NAME">
{_OPEN}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{_CLOSE}parameter>
...
{_CLOSE}invoke>
{_OPEN}invoke name="$TOOL_NAME2">
...
{_CLOSE}invoke>
{_CLOSE}calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_END = "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


class DeepSeekV41Renderer:
    """Its vocabulary has a token for the system's turns."""

    name = NAME
    supports_tools = True
    stop_strings: tuple[str, ...] = ()

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        backend = tokenizer.backend_tokenizer
        added = added_tokens(backend)
        missing = next((marker for marker in _MARKERS if added.id_of(marker) is None), None)
        if missing is not None:
            raise TemplateRefused(f"The renderer {NAME!r} needs the special token {missing!r}.")
        self._encoder = PromptEncoder(backend, added)
        self.stop_token_ids = known_ids(added.id_of(_TURN_END), tokenizer.eos_token_id)
        self._grammar = dsml_grammar(_FORM, added, self.stop_token_ids)
        self._marker_id = added.id_of(MARKER)

    def check_effort(self, effort: Effort | None) -> None:
        check_effort(effort, _EFFORTS)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        prompt = _Prompt(conversation)
        text = TracedText("", b"").join([*prompt.parts(), _trusted(_ASSISTANT), _trusted(prompt.prefill)])
        return RenderedPrompt(tuple(self._encoder.encode(text)), prompt.prefill)

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> LexedParser:
        assert self._marker_id is not None
        parser = TagParser(self._grammar, Start.after(prompt.prefill), tools)
        return LexedParser(DsmlLexer(_FORM, self._marker_id), parser)


class _Prompt:
    """The text of one conversation, in parts: those that are trusted may hold markers."""

    def __init__(self, conversation: Conversation) -> None:
        self._messages = conversation.messages
        self._tools = conversation.tools
        effort = conversation.effort
        self._budget = None if effort in (False, "none") else _BUDGETS[effort if isinstance(effort, str) else _DEFAULT]
        self.prefill = "</think>" if self._budget is None else "<think>"
        users = [index for index, message in enumerate(self._messages) if message.role in (Role.USER, Role.TOOL)]
        # Reasoning before the user's last turn is dropped, but not between calls.
        self._reasons_from = 0 if self._tools else max(users, default=-1)

    def parts(self) -> Iterator[str]:
        yield _trusted(_BEGINNING)
        rest = self._messages
        first, rest = (rest[:1], rest[1:]) if rest and rest[0].role is Role.SYSTEM else ((), rest)
        yield from self._system(first)
        start = len(first)
        for is_user, turn in groupby(enumerate(rest, start), lambda item: item[1].role in (Role.USER, Role.TOOL)):
            if is_user:
                yield from self._user(list(turn))
            else:
                for index, message in turn:
                    yield from self._other(index, message)

    def _system(self, first: Sequence[Message]) -> Iterator[str]:
        if first or self._tools or self._budget is not None:
            yield _trusted(_SYSTEM)
        if self._budget is not None:
            scale = "range 1-100, the higher the value, the more thorough the reasoning"
            yield f"Reasoning Effort: {self._budget} ({scale})\n\n"
        yield from (_text(message, 0) for message in first)
        if self._tools:
            yield "\n\n"
            yield _trusted(_TOOLS)
            yield from (f"{dump(tool.declared['function'])}\n" for tool in self._tools)
            yield _TOOLS_END

    def _user(self, turn: Sequence[tuple[int, Message]]) -> Iterator[str]:
        """Messages of the user and results of calls are one turn; the results are in the order of the calls."""
        before = self._messages[: turn[0][0]]
        order = [call.id for call in before[-1].tool_calls] if before else []
        yield _trusted(_USER)
        between = ""
        for role, run in groupby(turn, lambda item: item[1].role):
            messages = list(run)
            if role is Role.TOOL and all(message.tool_call_id in order for _, message in messages):
                messages.sort(key=lambda item: order.index(str(item[1].tool_call_id)))
            for index, message in messages:
                text = _text(message, index)
                yield between
                yield f"<tool_result>{text}</tool_result>" if role is Role.TOOL else text
                between = "\n\n"

    def _other(self, index: int, message: Message) -> Iterator[str]:
        text = _text(message, index)
        if message.role is Role.SYSTEM:
            yield _trusted(_SYSTEM)
            yield text
            return
        yield _trusted(_ASSISTANT)
        if self._budget is not None and index >= self._reasons_from:
            yield _trusted("<think>")
            yield message.reasoning or ""
        yield _trusted("</think>")
        yield text
        if message.tool_calls:
            yield _trusted(f"\n\n{_OPEN}calls>\n")
            for number, call in enumerate(message.tool_calls):
                yield from _call(call, f"messages[{index}].tool_calls[{number}].function.arguments")
            yield _trusted(f"{_CLOSE}calls>")
        yield _trusted(_TURN_END)


def _call(call: ToolCall, field: str) -> Iterator[str]:
    try:
        arguments = parse_object(call.arguments)
    except NotAnObject as exc:
        raise RenderError(f"{field} must be the text of a JSON object: {exc}.", field) from exc
    yield _trusted(f'{_OPEN}invoke name="')
    yield f'{call.name}">\n'
    for name, value in arguments.items():
        is_text = isinstance(value, str)
        yield _trusted(f'{_OPEN}parameter name="')
        yield f'{name}" string="{"true" if is_text else "false"}">{value if is_text else dump(value)}'
        yield _trusted(f"{_CLOSE}parameter>\n")
    if not arguments:
        yield "\n"
    yield _trusted(f"{_CLOSE}invoke>\n")


def _text(message: Message, index: int) -> str:
    if not all(isinstance(part, TextPart) for part in message.content or ()):
        raise RenderError(f"messages[{index}]: this model takes no images.")
    return message.text


def _trusted(text: str) -> TracedText:
    return TracedText.trusted(text)


def recognises(added: AddedTokens) -> bool:
    """Whether a vocabulary is this model's. (No other has a token for the system's turns and DSML.)"""
    return all(added.id_of(marker) is not None for marker in _MARKERS)
