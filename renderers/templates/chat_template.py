"""A model's own chat template: a conversation to token ids.

The result is that of transformers' `apply_chat_template`, with two differences. No text of the conversation ever
becomes a marker (see `provenance`, `encoder`). A template cannot exhaust the machine (see `sandbox`).

Templates differ in what they expect: content as text or as parts, arguments as text or as an object, an assistant turn
without text, reasoning in a field or as a part of the content. When a template is loaded, small conversations are
rendered in each of the ways to find out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2.exceptions import TemplateError

from renderers.base import PromptTooLong, RenderError, TemplateRefused
from renderers.markers import Tokenizer, added_tokens
from renderers.messages import ContentPart, Conversation, ImagePart, Message, Role, TextPart, Tool, ToolCall
from renderers.templates.bounds import TooMuch
from renderers.templates.encoder import PromptEncoder
from renderers.templates.prompt_length import tokens_beyond
from renderers.templates.provenance import TracedText
from renderers.templates.sandbox import BoundedTemplate, TemplateRefusal
from renderers.tools import NotAnObject, dump, parse_object

MAX_TEMPLATE_LEN = 65_536
"""The longest in use have 20 000. Compiling one of this length takes up to 3 s."""

MAX_PROBE_LEN = 2 * MAX_TEMPLATE_LEN
"""How many characters a template may write for a conversation of a few words."""

_FAULTS = (
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What a faulty template can raise when compiled or run, since jinja compiles it to Python."""

_MAX_MESSAGE_LEN = 1000


class _OverBounds(RenderError):
    """The template exceeded a limit. If this happens with a probe, the template is refused at once."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text, with the template's own characters marked, and as token ids."""

    text: TracedText
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Form:
    """How a template takes the inputs in which templates differ."""

    content_as_parts: bool = False
    arguments_as_text: bool = False
    empty_content: bool = False
    reasoning_as_part: bool = False


class ChatTemplate:
    """One template bound to one tokenizer; thread-safe.

    `max_tokens`: text that is certainly longer is not tokenised. It is for a template that is not the model's own,
    which may write megabytes about a word. Raises `TemplateRefused` if the template does not compile, or builds its
    markers in a way that cannot be distinguished from a caller's text.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | Mapping[str, str], *, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self.added = added_tokens(tokenizer.backend_tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._encoder = PromptEncoder(self._backend, self.added)
        self._special_tokens = _trusted_strings(tokenizer.special_tokens_map)
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise TemplateRefused("The model has several chat templates and none of them is the default.")
        self._template = _compiled(sources["default"])
        self._template_with_tools = _compiled(sources["tool_use"]) if "tool_use" in sources else self._template
        self._form = _Form()
        self._form = self._find_form()
        self.user_text = self._text_of(PROBE_USER)
        self.call_text = self._text_of(PROBE_CALL)
        self.takes_images = self._find_out_about_images()
        self.turn_end_ids = self._find_turn_end()

    def has_markers(self, *spellings: str) -> bool:
        return all(self.added.id_of(spelling) is not None for spelling in spellings)

    def render(self, conversation: Conversation, **variables: object) -> Rendered:
        """With the generation prompt; `variables` are the template's own, such as `enable_thinking`.

        Raises `RenderError`, with the template's own message where the template refuses, or `PromptTooLong`.
        """
        if not self.takes_images and any(_has_image(message) for message in conversation.messages):
            raise RenderError("messages: this model takes no images.")
        text = self._write(conversation, self._form, {**variables, "add_generation_prompt": True})
        self._check_length(text)
        return self._encoded(text)

    def _check_length(self, text: TracedText) -> None:
        if self._max_tokens is None or len(text) <= self._max_tokens:
            return  # encoding it costs no more than this check
        plain = "".join([text])
        count = tokens_beyond(self._max_tokens, [plain], self._backend)
        if count is not None:
            raise PromptTooLong(self._max_tokens, count)

    def _encoded(self, text: TracedText) -> Rendered:
        return Rendered(text, tuple(self._encoder.encode(text)))

    def _write(self, conversation: Conversation, form: _Form, variables: Mapping[str, object]) -> TracedText:
        template = self._template_with_tools if conversation.tools else self._template
        return _run(
            template,
            {
                **self._special_tokens,
                "messages": _template_messages(conversation.messages, form),
                "tools": [dict(tool.declared) for tool in conversation.tools] or None,
                "documents": None,
                **variables,
            },
        )

    def _find_form(self) -> _Form:
        form = self._best_form(PROBE_USER, _USER_WORDS, [_Form(), _Form(content_as_parts=True)])
        form = self._best_form(
            PROBE_CALL,
            _CALL_WORDS,
            [
                form,
                replace(form, empty_content=True),
                replace(form, arguments_as_text=True),
                replace(form, arguments_as_text=True, empty_content=True),
            ],
        )
        as_part = replace(form, reasoning_as_part=True)
        return as_part if self._shows_reasoning(as_part) and not self._shows_reasoning(form) else form

    def _best_form(self, conversation: Conversation, words: Sequence[str], forms: Sequence[_Form]) -> _Form:
        """The first form in which the template shows all the words, none as Python would print it. Otherwise the first
        that it does not refuse, otherwise the first.
        """
        accepted = [(form, rendered.text) for form in forms if (rendered := self._probe(conversation, form))]
        for form, text in accepted:
            if all(word in text and repr(word) not in text for word in words):
                return form
        return accepted[0][0] if accepted else forms[0]

    def _shows_reasoning(self, form: _Form) -> bool:
        """Whether reasoning stands in the prompt as itself, not in a part that is printed whole."""
        rendered = self._probe(_REASONED, form)
        text = "" if rendered is None else rendered.text
        return _REASONING in text and dump(_REASONING) not in text and repr(_REASONING) not in text

    def _text_of(self, conversation: Conversation) -> str:
        """What the template makes of a small conversation, which tells families apart; empty if it refuses it."""
        rendered = self._probe(conversation, self._form)
        return "" if rendered is None else "".join([rendered.text])

    def _find_out_about_images(self) -> bool:
        """Whether the template takes images: it then writes an image as at least one marker."""
        image = self._probe(_USER_IMAGE, self._form)
        text = self._probe(PROBE_USER, self._form)
        return image is not None and text is not None and self._num_markers(image) > self._num_markers(text)

    def _find_turn_end(self) -> frozenset[int]:
        """The special token that the template writes right after an assistant's text, if it does."""
        try:
            text = self._write(_ANSWERED, self._form, {"add_generation_prompt": False})
        except RenderError:
            return frozenset()
        after = text[text.rfind(_ANSWER) + len(_ANSWER) :].lstrip() if _ANSWER in text else ""
        ends = [
            token_id for token_id in self.added.special_ids if after.startswith(self.added.markers[token_id].content)
        ]
        return frozenset(ends)

    def _num_markers(self, rendered: Rendered) -> int:
        return sum(1 for token_id in rendered.token_ids if token_id in self.added.markers)

    def _probe(self, conversation: Conversation, form: _Form) -> Rendered | None:
        try:
            text = self._write(conversation, form, {"add_generation_prompt": True})
            if len(text) > MAX_PROBE_LEN:
                raise TemplateRefused(
                    f"The chat template writes {len(text)} characters for a conversation of a few words; "
                    f"the limit is {MAX_PROBE_LEN}."
                )
            rendered = self._encoded(text)
        except TemplateRefused:
            raise
        except _OverBounds as exc:
            raise TemplateRefused(str(exc)) from exc
        except RenderError:
            return None
        if list(rendered.token_ids) != self._backend.encode(rendered.text, add_special_tokens=False).ids:
            raise TemplateRefused(
                "The chat template builds its special tokens in a way that cannot be distinguished from a caller's "
                "text."
            )
        return rendered


def _compiled(source: str) -> BoundedTemplate:
    if len(source) > MAX_TEMPLATE_LEN:
        raise TemplateRefused(f"The chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_LEN}.")
    try:
        return BoundedTemplate(source)
    except _FAULTS as exc:
        raise TemplateRefused(f"The chat template does not compile: {_first_line(exc)}") from exc


def _run(template: BoundedTemplate, variables: Mapping[str, object]) -> TracedText:
    try:
        return template.render(variables)
    except TemplateRefusal as exc:
        raise RenderError(str(exc)[:_MAX_MESSAGE_LEN]) from exc
    except TooMuch as exc:
        raise _OverBounds(f"The chat template uses too much for this conversation: {exc}.") from exc
    except _FAULTS as exc:
        raise RenderError(f"The chat template cannot render this conversation: {_first_line(exc)}") from exc


def _first_line(exc: Exception) -> str:
    return (str(exc) or type(exc).__name__).splitlines()[0][:_MAX_MESSAGE_LEN]


def _trusted_strings(special_tokens: Mapping[str, Any]) -> dict[str, object]:
    return {
        name: TracedText.trusted(value) if isinstance(value, str) else [TracedText.trusted(item) for item in value]
        for name, value in special_tokens.items()
    }


def _template_messages(messages: Sequence[Message], form: _Form) -> list[dict[str, object]]:
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    rendered = []
    for index, message in enumerate(messages):
        fields = _template_message(message, form, f"messages[{index}]")
        if message.role is Role.TOOL and message.name is None and message.tool_call_id in names:
            fields["name"] = names[message.tool_call_id]
        rendered.append(fields)
    return rendered


def _template_message(message: Message, form: _Form, path: str) -> dict[str, object]:
    """The message as transformers passes it: without the keys whose value is None."""
    fields: dict[str, object] = {"role": TracedText.trusted(message.role.value)}
    content = _content(message, form)
    if content is not None:
        fields["content"] = content
    if message.reasoning is not None:
        fields |= {"thinking": message.reasoning, "reasoning_content": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            _template_call(call, form, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value is not None:
            fields[name] = value
    return fields


def _content(message: Message, form: _Form) -> str | list[dict[str, object]] | None:
    if form.reasoning_as_part and message.reasoning:
        thinking: dict[str, object] = {"type": "thinking", "thinking": message.reasoning}
        return [thinking, *map(_template_part, message.content or ())]
    if message.content is None:
        return "" if form.empty_content else None
    if form.content_as_parts or _has_image(message):
        return [_template_part(part) for part in message.content]
    return message.text


def _has_image(message: Message) -> bool:
    return any(isinstance(part, ImagePart) for part in message.content or ())


def _template_part(part: ContentPart) -> dict[str, object]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


def _template_call(call: ToolCall, form: _Form, path: str) -> dict[str, object]:
    try:
        arguments = parse_object(call.arguments)
    except NotAnObject as exc:
        field = f"{path}.function.arguments"
        raise RenderError(f"{field} must be the text of a JSON object: {exc}.", field) from exc
    function = {"name": call.name, "arguments": call.arguments if form.arguments_as_text else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _user(*parts: ContentPart) -> Message:
    return Message(Role.USER, parts)


_USER_WORDS = ("sphinx",)
PROBE_USER = Conversation((_user(TextPart("sphinx")),))
_USER_IMAGE = Conversation((_user(ImagePart(0), TextPart("sphinx")),))
_ANSWER = "quartz"
_ANSWERED = Conversation((_user(TextPart("sphinx")), Message(Role.ASSISTANT, (TextPart(_ANSWER),))))
_REASONING = "zephyr"
_REASONED = Conversation(
    (_user(TextPart("sphinx")), Message(Role.ASSISTANT, (TextPart(_ANSWER),), reasoning=_REASONING))
)
_CALL_WORDS = ("sphinx", "judge", "onyx", "vow")
_CALL_PARAMETERS = {"type": "object", "properties": {"stone": {"type": "string", "description": "A stone."}}}
# Mistral's templates want ids of nine letters and digits.
PROBE_CALL = Conversation(
    messages=(
        _user(TextPart("sphinx")),
        Message(Role.ASSISTANT, None, tool_calls=(ToolCall("call00001", "judge", '{"stone": "onyx"}'),)),
        Message(Role.TOOL, (TextPart("vow"),), tool_call_id="call00001"),
    ),
    tools=(
        Tool(
            name="judge",
            parameters=_CALL_PARAMETERS,
            declared={
                "type": "function",
                "function": {"name": "judge", "description": "Judges.", "parameters": _CALL_PARAMETERS},
            },
        ),
    ),
)
