"""What the families have in common whose replies are made of tagged blocks (see `replies.tags`)."""

from collections.abc import Iterable, Mapping, Sequence

from renderers.base import RenderedPrompt, RenderError, ReplyParser, TemplateRefused
from renderers.efforts import Efforts, check_effort, switch
from renderers.messages import Conversation, Effort, Tool
from renderers.replies.tags import Start, Tag, TagGrammar, TagParser
from renderers.templates.chat_template import PROBE_USER, ChatTemplate


class TaggedRenderer:
    """One model, described by what its family knows of it.

    `headers`: after the last of these in a prompt, the reply begins. `think_tags`: how a prompt spells what opens and
    what closes reasoning.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        template: ChatTemplate,
        *,
        headers: Sequence[str],
        grammar: TagGrammar,
        efforts: Efforts,
        supports_tools: bool = True,
        think_tags: tuple[str, str] = ("<think>", "</think>"),
    ) -> None:
        self.name = name
        self.supports_tools = supports_tools
        self.stop_token_ids = grammar.end_ids
        self._template = template
        self._headers = headers
        self._grammar = grammar
        self._efforts = efforts
        self._think_tags = think_tags

    def check_effort(self, effort: Effort | None) -> None:
        check_effort(effort, self._efforts)

    def render(self, conversation: Conversation) -> RenderedPrompt:
        self.check_effort(conversation.effort)
        rendered = self._template.render(conversation, **self.variables(conversation))
        return RenderedPrompt(rendered.token_ids, after_header(rendered.text, self._headers))

    def variables(self, conversation: Conversation) -> Mapping[str, object]:
        """The template's own arguments."""
        return {} if conversation.effort is None else self._efforts[conversation.effort]

    def parser(self, prompt: RenderedPrompt, tools: Sequence[Tool]) -> ReplyParser:
        return TagParser(self._grammar, Start.after(prompt.prefill, *self._think_tags), tools)


def needed_template(name: str, template: ChatTemplate | None) -> ChatTemplate:
    """Raises `TemplateRefused`."""
    if template is None:
        raise TemplateRefused(f"The model has no chat template, and the renderer {name!r} needs one.")
    return template


def needed_id(name: str, template: ChatTemplate, marker: str) -> int:
    """The marker's id. Raises `TemplateRefused`."""
    token_id = template.added.id_of(marker)
    if token_id is None:
        raise TemplateRefused(f"The renderer {name!r} needs the special token {marker!r}.")
    return token_id


def needed_tags(name: str, template: ChatTemplate, tags: Mapping[str, Tag]) -> dict[int, Tag]:
    """Tags by the ids of their markers. Raises `TemplateRefused` if the vocabulary lacks one."""
    return {needed_id(name, template, spelling): tag for spelling, tag in tags.items()}


def known_tags(template: ChatTemplate, tags: Mapping[str, Tag]) -> dict[int, Tag]:
    """The same for those that the vocabulary has."""
    id_of = template.added.id_of
    return {token_id: tag for spelling, tag in tags.items() if (token_id := id_of(spelling)) is not None}


def find_start(template: ChatTemplate, headers: Sequence[str], **variables: object) -> Start:
    """Where a reply begins if the template is told so."""
    try:
        return Start.after(after_header(template.render(PROBE_USER, **variables).text, headers))
    except RenderError:
        return Start.TEXT


def find_switch(template: ChatTemplate, headers: Sequence[str], variable: str) -> Efforts:
    """What this argument of the template switches: reasoning, or nothing."""
    on, off = (find_start(template, headers, **{variable: value}) for value in (True, False))
    return switch(variable) if on is not off else {}


def find_efforts(template: ChatTemplate, headers: Sequence[str], variable: str) -> Efforts:
    """The same; a model that the argument does not switch always reasons, or never."""
    switched = find_switch(template, headers, variable)
    if not switched and find_start(template, headers, **{variable: True}) is not Start.TEXT:
        return {True: {}}
    return switched


def changes(template: ChatTemplate, **variables: object) -> bool:
    """Whether the template heeds these arguments."""
    try:
        return template.render(PROBE_USER, **variables).text != template.render(PROBE_USER).text
    except RenderError:
        return False


def after_header(text: str, headers: Iterable[str]) -> str:
    """The text with which the prompt already starts the reply."""
    ends = [text.rindex(header) + len(header) for header in headers if header in text]
    return text[max(ends) :] if ends else ""


def known_ids(*token_ids: int | None) -> frozenset[int]:
    return frozenset(token_id for token_id in token_ids if token_id is not None)
