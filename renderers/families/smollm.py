"""SmolLM2: ChatML without reasoning and tools. SmolLM3: a hybrid that calls as Qwen does.

SmolLM3's template renders no calls of a history: it shows the results alone. Nor does it take tools as others do, but
in a variable of its own, if at all.
"""

from collections.abc import Mapping

from renderers.base import RenderError
from renderers.families.chatml import HEADER, TAGS, TURN_END, end_ids, find_efforts
from renderers.families.generic import GenericRenderer
from renderers.families.tagged import TaggedRenderer, needed_tags, needed_template
from renderers.markers import Tokenizer
from renderers.messages import Conversation
from renderers.replies.json_calls import parse_json_call
from renderers.replies.tags import Framing, TagGrammar
from renderers.templates.chat_template import PROBE_CALL, PROBE_USER, ChatTemplate

SMOLLM2 = "smollm2"
SMOLLM3 = "smollm3"
_INTRODUCTION = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_MODE = "Reasoning Mode: /think"
_DECLARED = "Judges."
"""A word of the tool in `PROBE_CALL`."""


class SmolLM2Renderer(GenericRenderer):
    """A reply ends with its turn, or where the text ends."""

    name = SMOLLM2

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        super().__init__(tokenizer, template)
        self.stop_token_ids |= end_ids(self.name, tokenizer, self._template).keys()


class SmolLM3Renderer(TaggedRenderer):
    """Calls are parsed if the template can show the functions to the model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        template = needed_template(SMOLLM3, template)
        self._tools_variable = _find_tools_variable(template)
        tags = needed_tags(SMOLLM3, template, TAGS) | end_ids(SMOLLM3, tokenizer, template)
        framing = Framing(after_think_open=1, before_think_close=1, after_think_close=2, before_call=1)
        super().__init__(
            SMOLLM3,
            template,
            headers=[HEADER],
            grammar=TagGrammar(tags, parse_json_call, framing=framing),
            efforts=find_efforts(template),
            supports_tools=self._tools_variable is not None,
        )

    def variables(self, conversation: Conversation) -> Mapping[str, object]:
        variables = super().variables(conversation)
        if self._tools_variable is None or not conversation.tools:
            return variables
        return {**variables, **_tools(self._tools_variable, conversation)}


def _find_tools_variable(template: ChatTemplate) -> str | None:
    """The variable in which the template takes tools; None if it takes none."""
    asked = Conversation(PROBE_USER.messages, PROBE_CALL.tools)
    for variable in ("tools", "xml_tools"):
        try:
            text = template.render(asked, **_tools(variable, asked)).text
        except RenderError:
            continue
        if _DECLARED in text:
            return variable
    return None


def _tools(variable: str, conversation: Conversation) -> Mapping[str, object]:
    """`xml_tools` are functions without the API's shell around them, as the model's card has them."""
    if variable == "tools":
        return {}
    return {variable: [dict(tool.declared["function"]) for tool in conversation.tools]}


def recognises_2(template: ChatTemplate) -> bool:
    """Whether the template writes SmolLM2's introduction where there is no system message."""
    return template.has_markers(TURN_END) and f"system\n{_INTRODUCTION}{TURN_END}" in template.user_text


def recognises_3(template: ChatTemplate) -> bool:
    """Whether the template writes the mode of reasoning, and the vocabulary has the tags."""
    return template.has_markers(TURN_END, *TAGS) and _MODE in template.user_text
